"""poolmeter.pages"""
