"""Collector: pulls exporters, checks their records, keeps them in a store that anyone may read, and answers questions over HTTP."""
