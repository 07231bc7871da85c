"""poolmeter.books"""
