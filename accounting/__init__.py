"""Accounting: usage and chargeback from the collector's store, price plans, and the recommender."""
