"""poolmeter.alerts"""
