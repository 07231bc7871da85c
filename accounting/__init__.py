"""poolmeter.accounting"""
