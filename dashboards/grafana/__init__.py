"""The Grafana dashboard over poolmeter's Prometheus metrics, generated."""
