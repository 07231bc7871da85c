"""What goes wrong with a page.

DataError
└── PageError
    ├── TamperedPage       a page that its writers cannot have left so: short, a FIFO, a link, holes, another magic
    └── PageVersionError   a page of another ABI
"""

from poolmeter.errors import DataError


class PageError(DataError):
    """A grant, meter or board page that cannot be used."""


class TamperedPage(PageError):
    """A page that no writer of ours leaves behind; one such page must never stop a reader's tick."""


class PageVersionError(PageError):
    """A page whose ABI major version is not ours."""
