"""Dashboards: the Streamlit one over the store, and the Grafana one over Prometheus. They read; nothing depends on them."""
