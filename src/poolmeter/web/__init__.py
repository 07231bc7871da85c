"""HTTP faces and their clients, what exporter and collector have in common: web configuration, TLS, who may ask, OTLP over HTTP."""
