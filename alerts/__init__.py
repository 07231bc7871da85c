"""Alerts. The rules are data for Prometheus, in rules/; docs/dashboards.md says how to load them."""
