"""How a client of a collector or exporter knows the server, and says who it is itself: authorities, certificate and key in files."""

import ssl
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.errors import BadInput

if TYPE_CHECKING:
    from poolmeter.config import CollectorSection


@dataclass(frozen=True)
class Trust:
    """`ca_file`: PEM certificates of the authorities of servers, in place of the system's; `cert_file`, `key_file`: our own certificate."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def context(self, name: str = "CA file") -> ssl.SSLContext:
        """A client context. Raises BadInput naming the file that cannot be used; `name` is what says which one the authorities' is."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{name} {self.ca_file} cannot be used: {_reason(error)}, expected a PEM file of authorities' certificates"
            ) from None
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file, password="")
            except (OSError, ValueError) as error:
                names = f"{self.cert_file} and key {self.key_file or self.cert_file}"
                raise BadInput(f"client certificate {names} cannot be used: {_reason(error)}; expected PEM, the key its own") from None
        return context

    def opener(self, url: str) -> urllib.request.OpenerDirector:
        """Asks the server of a URL directly: a proxy of the environment is for other places. Raises BadInput."""
        # The system's authorities take tens of ms to read, for nothing where no TLS is spoken.
        handlers = [urllib.request.HTTPSHandler(context=self.context())] if url.startswith("https:") else []
        return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)


SYSTEM = Trust()


def trust_of(section: "CollectorSection", ca_file: str | None = None) -> Trust:
    """What the configuration says of a collector's clients; `ca_file` (a flag) goes before it."""
    return Trust(Path(ca_file) if ca_file is not None else section.api_ca_file, section.api_cert_file, section.api_key_file)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or getattr(error, "reason", None) or error)
