"""Whose a process is: sources that each make claims, and `Who`, which joins them in an order of trust (docs/reference/attribution.md)."""

from poolmeter.exporter.attribution.own import OwnAllocations
from poolmeter.exporter.attribution.source import Attribution, Owner, ProcessKey
from poolmeter.exporter.attribution.who import Allocations, Belonging, Who

__all__ = ["Allocations", "Attribution", "Belonging", "OwnAllocations", "Owner", "ProcessKey", "Who"]
