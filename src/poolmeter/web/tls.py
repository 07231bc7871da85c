"""TLS contexts from a web configuration, renewed when the files behind them change.

Each new connection takes the context of the moment, so that a certificate rotated on disk, or a new web configuration, is in force from the
next connection on; those that stand go on with what they began with.
"""

import ipaddress
import logging
import os
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poolmeter.errors import BadInput
from poolmeter.web.config import CIPHERS, CURVES, Tls

_LOG = logging.getLogger("poolmeter.web")
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


def make_context(config: Tls) -> ssl.SSLContext:
    """A server context. Raises BadInput for a file that cannot be used, saying which."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[config.min_version]
    context.maximum_version = _VERSIONS[config.max_version]
    for name, path in (("cert_file", config.cert_file), ("key_file", config.key_file), ("client_ca_file", config.client_ca_file)):
        if path is not None:
            _readable(name, path)
    try:
        # A key that asks for a passphrase would ask the terminal.
        context.load_cert_chain(config.cert_file, config.key_file, password="")
    except (OSError, ValueError) as error:
        raise BadInput(
            f"cert_file {config.cert_file} and key_file {config.key_file} cannot be used together: {_reason(error)}; "
            "expected a PEM certificate and its own PEM key without a passphrase"
        ) from None
    if config.client_ca_file is not None:
        try:
            context.load_verify_locations(cafile=config.client_ca_file)
        except (OSError, ValueError) as error:
            raise BadInput(
                f"client_ca_file {config.client_ca_file} cannot be used: {_reason(error)}; expected PEM certificates of authorities"
            ) from None
        required = config.client_auth_type == "RequireAndVerifyClientCert"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    if config.cipher_suites:
        context.set_ciphers(":".join(CIPHERS[name] for name in config.cipher_suites))
    if config.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if config.curve_preferences:
        context.set_ecdh_curve(CURVES[config.curve_preferences[0]])
    if config.client_allowed_sans:
        context.sslobject_class = _checking(frozenset(config.client_allowed_sans))
    return context


def _readable(name: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise BadInput(f"{name} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).replace("_", " ").lower() if isinstance(error, ssl.SSLError) else str(reason)


def _checking(allowed: frozenset[str]) -> type[ssl.SSLObject]:
    """A connection that fails unless the client's certificate bears one of these names."""

    class Checking(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            found = names_of(self.getpeercert() or {})
            if not found & allowed:
                raise ssl.SSLCertVerificationError(f"the client's certificate is for {sorted(found)!r:.200}, none of client_allowed_sans")

    return Checking


def names_of(certificate: Mapping[str, Any]) -> frozenset[str]:
    """DNS names, addresses, e-mail addresses and URIs of a certificate's subjectAltName."""
    found = set()
    for kind, value in certificate.get("subjectAltName", ()):
        if kind == "IP Address":
            found.add(str(ipaddress.ip_address(value.strip())))
        elif kind in ("DNS", "email", "URI"):
            found.add(value)
    return frozenset(found)


class RotatingContext(ssl.SSLContext):
    """A context that hands each new connection to the newest one made of `config`'s files. asyncio asks it by `wrap_bio`.

    Files that cannot be used, say in the midst of a rotation, leave the last good context in force, and are said once.
    """

    def __new__(cls, *_: Tls) -> "RotatingContext":
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, config: Tls) -> None:
        self._mutex = threading.Lock()
        self._config = config
        self._inner = make_context(config)
        self._marks = _marks(config)

    def replace(self, config: Tls) -> None:
        """Take another configuration for connections to come. Raises BadInput and keeps the old one when its files cannot be used."""
        marks, inner = _marks(config), make_context(config)
        with self._mutex:
            self._config, self._inner, self._marks = config, inner, marks

    def newest(self) -> ssl.SSLContext:
        """The context in force now."""
        with self._mutex:
            marks = _marks(self._config)
            if marks != self._marks:
                self._marks = marks
                try:
                    self._inner = make_context(self._config)
                    _LOG.info("certificate %s is new; connections from now on get it", self._config.cert_file)
                except BadInput as error:
                    _LOG.error("%s; the certificate read before stays in force", error)
            return self._inner

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self.newest().wrap_bio(*arguments, **options)

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        return self.newest().wrap_socket(*arguments, **options)


def _marks(config: Tls) -> tuple[object, ...]:
    """What changes when a file is replaced or written."""
    found: list[object] = []
    for path in (config.cert_file, config.key_file, config.client_ca_file):
        try:
            about = os.stat(Path(path)) if path is not None else None
        except OSError as error:
            found.append(error.errno)
            continue
        found.append(None if about is None else (about.st_ino, about.st_mtime_ns, about.st_size))
    return tuple(found)
