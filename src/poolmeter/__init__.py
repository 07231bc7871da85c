"""poolmeter: observability and accounting for pooled GPUs."""

__version__ = "0.1.0"
