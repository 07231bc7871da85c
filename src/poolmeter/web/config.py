"""The web configuration file: who may ask, and over what. The format is that of Prometheus' exporter-toolkit (YAML).

One key is added: `bearer_token_files`, a list of files with one token each. What Python's ssl cannot do is refused, never ignored;
docs/reference/web-config.md lists it. Paths are relative to the file's own folder.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError, model_validator

from poolmeter.errors import BadInput
from poolmeter.tokens import read_token

MAX_BYTES = 1 << 20
# Names of Go's crypto/tls, as the format wants them, and OpenSSL's.
CIPHERS = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
}
CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
HEADERS = ("Content-Security-Policy", "X-Frame-Options", "X-Content-Type-Options", "X-XSS-Protection", "Strict-Transport-Security")
_BCRYPT = re.compile(r"\$2[abxy]?\$(\d\d)\$[./A-Za-z0-9]{53}")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_SCALES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tls(_Section):
    """`tls_server_config`. Client certificates are verified or not asked for: Python cannot take one unverified."""

    cert_file: StrictStr
    key_file: StrictStr
    client_ca_file: StrictStr | None = None
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_allowed_sans: tuple[StrictStr, ...] = ()
    min_version: Literal["TLS12", "TLS13"] = "TLS12"
    max_version: Literal["TLS12", "TLS13"] = "TLS13"
    cipher_suites: tuple[Annotated[str, Field(strict=True)], ...] = ()
    prefer_server_cipher_suites: StrictBool = True
    curve_preferences: tuple[StrictStr, ...] = ()

    @model_validator(mode="after")
    def _together(self) -> "Tls":
        verified = self.client_auth_type != "NoClientCert"
        if verified != (self.client_ca_file is not None):
            found = f"client_auth_type {self.client_auth_type} {'without' if verified else 'with'} client_ca_file"
            raise ValueError(
                f"{found}; expected both VerifyClientCertIfGiven or RequireAndVerifyClientCert and a client_ca_file, or neither"
            )
        if self.client_allowed_sans and self.client_auth_type != "RequireAndVerifyClientCert":
            raise ValueError(f"client_allowed_sans with client_auth_type {self.client_auth_type}; expected RequireAndVerifyClientCert")
        if self.min_version > self.max_version:
            raise ValueError(f"min_version {self.min_version} above max_version {self.max_version}")
        unknown = [name for name in self.cipher_suites if name not in CIPHERS]
        if unknown:
            raise ValueError(f"cipher_suites names {unknown[0]!r:.60}; expected suites of TLS 1.2 such as {next(iter(CIPHERS))}")
        if len(self.curve_preferences) > 1 or any(name not in CURVES for name in self.curve_preferences):
            raise ValueError(f"curve_preferences is {list(self.curve_preferences)!r:.80}; expected one of {', '.join(CURVES)}")
        return self


class Http(_Section):
    """`http_server_config`. There is no HTTP/2; asking for it changes nothing, as it is negotiated."""

    http2: StrictBool = True
    headers: dict[Annotated[str, Field(strict=True)], StrictStr] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known(self) -> "Http":
        for name, value in self.headers.items():
            if name not in HEADERS:
                raise ValueError(f"headers names {name!r:.60}; expected {', '.join(HEADERS)}")
            if not value.isascii() or not value.isprintable():
                raise ValueError(f"header {name} is {value!r:.60}; expected printable ASCII")
        return self


class RateLimit(_Section):
    """`rate_limit`: one request in `interval`, with up to `burst` at once. Interval 0: no limit."""

    interval: StrictStr | Annotated[int, Field(strict=True, ge=0, le=0)] = 0
    burst: Annotated[int, Field(strict=True, ge=0)] = 0

    @model_validator(mode="after")
    def _measured(self) -> "RateLimit":
        if self.seconds > 0 and self.burst < 1:
            raise ValueError("burst is 0; expected 1 or more beside an interval")
        return self

    @property
    def seconds(self) -> float:
        """The interval. Raises ValueError for text that is no duration such as 250ms or 1m30s."""
        if self.interval in (0, "0"):
            return 0.0
        text = str(self.interval)
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError(f"interval is {text!r:.40}; expected a duration such as 250ms")
        return sum(float(number) * _SCALES[unit] for number, unit in parts)


class WebConfig(_Section):
    """The whole file. `tokens` are what the files of `bearer_token_files` held when it was read."""

    tls_server_config: Tls | None = None
    http_server_config: Http = Field(default_factory=Http)
    basic_auth_users: dict[Annotated[str, Field(strict=True, min_length=1)], StrictStr] = Field(default_factory=dict)
    rate_limit: RateLimit = Field(default_factory=RateLimit)
    bearer_token_files: tuple[StrictStr, ...] = ()
    tokens: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _hashed(self) -> "WebConfig":
        for name, value in self.basic_auth_users.items():
            found = _BCRYPT.fullmatch(value)
            if ":" in name or not name.isprintable():
                raise ValueError(f"basic_auth_users names {name!r:.60}; expected printable characters without a colon")
            if found is None or not 4 <= int(found[1]) <= 31:
                raise ValueError(
                    f"password of user {name!r:.60} is no bcrypt hash; expected $2y$10$ and 53 characters (htpasswd -nBC 10 '')"
                )
        return self

    @property
    def guarded(self) -> bool:
        """Whether a request must say who it is from."""
        return bool(self.basic_auth_users or self.tokens)


class _Loader(yaml.SafeLoader):
    """YAML in which a key may be written once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.YAMLError(f"key {twice[0]!r:.60} is there twice")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found

    def construct_yaml_int(self, node: Any) -> int:
        found: int = super().construct_yaml_int(node)
        repr(found)  # one in hexadecimal may have more digits than can be shown in decimal, as a message would
        return found


# The base class's own is entered under this tag as a function, which no method overrides.
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load_web_config(path: Path) -> WebConfig:
    """The checked file, its paths absolute and its token files read. Raises BadInput with one sentence."""
    return parse_web_config(*_read(path), path.absolute().parent)


def speaks_tls(path: Path) -> bool:
    """Whether the file turns TLS on. Raises BadInput for one that cannot be read; files that it names may be others' to read, and are not."""
    return _checked(*_read(path)).tls_server_config is not None


def _read(path: Path) -> tuple[bytes, str]:
    name = f"web configuration file {path}"
    try:
        with path.open("rb") as file:
            body = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise BadInput(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(body) > MAX_BYTES:
        raise BadInput(f"{name} has more than {MAX_BYTES} bytes")
    return body, name


def _checked(body: bytes, name: str) -> WebConfig:
    try:
        values = yaml.load(body, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BadInput(f"{name} is no YAML: {' '.join(str(error).split())}") from None
    except Exception:  # of `!!bool x` a dictionary complains, of `!!int ''` an index: whatever the tag's constructor trips over
        raise BadInput(f"{name} is no YAML: a value has another form than its tag says") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise BadInput(f"{name} is {values!r:.40}, expected keys such as tls_server_config and basic_auth_users")
    if "tokens" in values:
        raise BadInput(f"{name}: tokens is not a known key")
    try:
        return WebConfig.model_validate(values)
    except ValidationError as error:
        raise BadInput(f"{name}: {_said(error)}") from None


def parse_web_config(body: bytes, name: str, folder: Path) -> WebConfig:
    """The configuration in YAML bytes; `name` is what errors call it. Raises BadInput."""
    config = _checked(body, name)
    tls = config.tls_server_config
    if tls is not None:
        names = {
            key: str(folder / value) for key in ("cert_file", "key_file", "client_ca_file") if (value := getattr(tls, key)) is not None
        }
        tls = tls.model_copy(update=names)
    tokens = tuple(read_token(folder / file) for file in config.bearer_token_files)
    return config.model_copy(update={"tls_server_config": tls, "tokens": tokens})


def _said(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{key} is not a known key, or one that cannot be honoured"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{key}: {message}" if key else message
    if first["type"] == "missing":
        return f"{key} is missing"
    found = "not text" if key.startswith("basic_auth_users") else f"{first['input']!r:.60}"
    return f"{key} is {found}, expected: {message}"
