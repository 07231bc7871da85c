"""Rules from configuration that make a tenant's name of another name: patterns first, then a form."""

import fnmatch
import re
from dataclasses import dataclass

from poolmeter.model.naming import printable

_FIELD = re.compile(r"\{([a-z_]*)\}")


@dataclass(frozen=True)
class TenantRule:
    """`patterns` are (glob over the name, tenant), the first that fits decides; else `form`, as `{namespace}`; an empty form names nobody."""

    patterns: tuple[tuple[str, str], ...] = ()
    form: str = ""

    def tenant(self, name: str | None, **values: str | None) -> tuple[str | None, bool]:
        """The tenant of what is called `name`, and whether a pattern said so. A form with a value that is not known names nobody."""
        if name is not None:
            for pattern, tenant in self.patterns:
                if fnmatch.fnmatchcase(name, pattern):
                    return tenant, True
        fields = _FIELD.findall(self.form)
        if not self.form or any(not values.get(field) for field in fields):
            return None, False
        return printable(_FIELD.sub(lambda match: values[match[1]] or "", self.form)), False


def fields_of(form: str) -> frozenset[str]:
    """The names in braces of a form."""
    return frozenset(_FIELD.findall(form))


def parse_pattern(text: str) -> tuple[str, str]:
    """(glob, tenant) of `team-a-*=team-a`. Raises ValueError."""
    pattern, equals, tenant = text.rpartition("=")
    if not equals or not pattern.strip() or not tenant.strip() or not text.isprintable():
        raise ValueError("a pattern and a tenant, as team-a-*=team-a")
    return pattern.strip(), tenant.strip()
