"""poolmeter.rules"""
