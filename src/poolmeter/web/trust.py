"""How a client of a collector or exporter knows the server, and says who it is itself: authorities, certificate and key in files."""

import ssl
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from poolmeter.errors import BadInput


@dataclass(frozen=True)
class Trust:
    """`ca_file`: PEM certificates of the authorities of servers, in place of the system's; `cert_file`, `key_file`: our own certificate."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """A client context. Raises BadInput naming the file that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ValueError) as error:
            raise BadInput(f"CA file {self.ca_file} cannot be used: {_reason(error)}; expected PEM certificates of authorities") from None
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file, password="")
            except (OSError, ValueError) as error:
                names = f"{self.cert_file} and key {self.key_file or self.cert_file}"
                raise BadInput(f"client certificate {names} cannot be used: {_reason(error)}; expected PEM, the key its own") from None
        return context

    def opener(self) -> urllib.request.OpenerDirector:
        """Asks the servers of a pool directly: a proxy of the environment is for other places. Raises BadInput."""
        return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.context()))


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or getattr(error, "reason", None) or error)
