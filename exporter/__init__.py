"""poolmeter.exporter"""
