"""Whose a process is. `Attribution` is what a source of answers provides; for now there is one: our own allocations."""

from poolmeter.exporter.attribution.own import OwnAllocations
from poolmeter.exporter.attribution.source import Attribution, Owner, ProcessKey

__all__ = ["Attribution", "OwnAllocations", "Owner", "ProcessKey"]
