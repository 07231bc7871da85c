"""Pages under the names of other exporters, for dashboards made for those; each on a path of its own, `/metrics/NAME`. Off by default."""

from collections.abc import Mapping, Sequence

from poolmeter.exporter.collectors import FAMILIES
from poolmeter.exporter.collectors.family import Family
from poolmeter.exporter.compat import dcgm, hami

PAGES: Mapping[str, tuple[Family, ...]] = {"dcgm": dcgm.FAMILIES, "hami": hami.FAMILIES}


def families_of(compat: Sequence[str]) -> tuple[Family, ...]:
    """Our own families, and those of each page that is named."""
    return (*FAMILIES, *(family for name in compat for family in PAGES[name]))


__all__ = ["PAGES", "families_of"]
