"""poolmeter.dashboards"""
