"""poolmeter.vendors"""
