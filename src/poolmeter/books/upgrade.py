"""Bringing books to this program's revision, for whoever has them for their own: the collector at its start, `poolmeter store migrate`."""

from pathlib import Path

from sqlalchemy.exc import DBAPIError

from poolmeter.books.backend import Purpose
from poolmeter.books.database import backend_of
from poolmeter.books.migrate import Upgraded, bring_up


def upgrade(where: Path | str) -> Upgraded:
    """Bring the books at a path or URL up, in one transaction; empty ones get their tables. Any number may call it at once.

    Raises BadInput for books of a newer program, which are left as they are, and for no books; DataError; Unavailable.
    """
    backend = backend_of(where)
    try:
        with backend.begin(Purpose.UPGRADE) as connection:
            return bring_up(connection, backend.name)
    except DBAPIError as error:
        raise backend.refusal(error) from None
    finally:
        backend.close()
