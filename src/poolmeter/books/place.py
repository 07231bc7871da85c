"""Where the books are: a file of this machine, or a PostgreSQL database named by a URL that holds no secret."""

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from poolmeter.errors import BadInput

SCHEME = "postgresql://"
# What may follow the URL's "?": how to reach and trust the server. Secrets and settings of the session may not.
PARAMETERS = frozenset(
    {
        "application_name", "channel_binding", "dbname", "gssencmode", "host", "hostaddr", "krbsrvname", "load_balance_hosts", "passfile",
        "port", "require_auth", "service", "sslcert", "sslcertmode", "sslcrl", "sslkey", "sslmode", "sslnegotiation", "sslrootcert",
        "target_session_attrs", "user",
    }
)  # fmt: skip


def is_url(where: Path | str) -> bool:
    """Whether `where` is a database's URL and not a file."""
    return isinstance(where, str) and "://" in where


def check_url(text: str) -> str:
    """`text`, a URL as postgresql://user@host:5432/name. Raises BadInput, which never repeats a password."""
    if not text.startswith(SCHEME) or not text.isprintable() or " " in text:
        raise BadInput(f"books are {text.partition('://')[0]!r:.40}, expected a file or a URL such as {SCHEME}user@host/name")
    try:
        parts = urlsplit(text)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise BadInput(f"books have a URL that cannot be read, expected one such as {SCHEME}user@host/name") from None
    if parts.fragment:
        raise BadInput(f"books have a URL with a fragment, expected one such as {SCHEME}user@host/name")
    secret = ":" in parts.netloc.rpartition("@")[0] or any("password" in name.lower() for name, _ in given)
    if secret:
        raise BadInput("books have a URL with a password, expected it in the file that PGPASSFILE or the URL's passfile names")
    for name, _ in given:
        if name not in PARAMETERS:
            raise BadInput(f"books have a URL with {name!r:.40}, expected parameters of {', '.join(sorted(PARAMETERS))}")
    return text


def place(configured: str | None, file: Path) -> Path | str:
    """The books that a configuration names, else `file`."""
    return file if configured is None else configured
