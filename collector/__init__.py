"""poolmeter.collector"""
