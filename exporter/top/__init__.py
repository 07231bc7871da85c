"""`poolmeter top`: a live view of cards, slices, tenants and processes, from snapshots of exporters or of a collector."""
