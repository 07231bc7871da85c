"""Metric families of `/metrics`, one file a family of families. `FAMILIES` is the list, in page order."""

from poolmeter.exporter.collectors import amounts, device, holders, itself, parts, pool, reconciliation, slices
from poolmeter.exporter.collectors.family import Family

FAMILIES: tuple[Family, ...] = (
    *device.FAMILIES,
    *parts.FAMILIES,
    *reconciliation.FAMILIES,
    *slices.FAMILIES,
    *holders.FAMILIES,
    *pool.FAMILIES,
    *amounts.FAMILIES,
    *itself.FAMILIES,
)

__all__ = ["FAMILIES", "Family"]
