"""poolmeter.sharing"""
