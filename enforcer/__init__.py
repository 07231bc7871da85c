"""poolmeter.enforcer"""
