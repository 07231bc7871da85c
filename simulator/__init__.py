"""poolmeter.simulator"""
