"""Frozen records to plain JSON values and back, checked: the one codec for allocation files, snapshots, decisions and events."""

import functools
import json
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from poolmeter.errors import DataError

T = TypeVar("T")


def to_plain(value: object) -> Any:
    """A JSON value; fields that are None are left out (absent means unknown)."""
    if is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
        return {name: item for name, item in plain.items() if item is not None}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return value


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text, so that it can be hashed."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def from_plain(record_type: type[T], value: object, what: str = "") -> T:
    """A record from its plain form. Unknown keys are ignored (a newer writer); a missing or mistyped one raises DataError."""
    return typing.cast(T, _decode(record_type, value, what or record_type.__name__))


@functools.cache
def _hints(record_type: type) -> dict[str, Any]:
    # Evaluating annotations is most of the work of decoding a small record.
    return typing.get_type_hints(record_type)


@functools.cache
def _scalars(record_type: type) -> tuple[tuple[str, type], ...]:
    # Most fields are text or a whole number, and right: they need no walk through the hint.
    found = []
    for name, hint in _hints(record_type).items():
        union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        parts = [part for part in typing.get_args(hint) if part is not type(None)] if union else [hint]
        if len(parts) == 1 and parts[0] in (int, str, bool):
            found.append((name, parts[0]))
    return tuple(found)


def _decode(hint: Any, value: Any, what: str) -> Any:
    origin = typing.get_origin(hint)
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        if value is None:
            return None
        return _decode(next(part for part in typing.get_args(hint) if part is not type(None)), value, what)
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise DataError(f"{what} is {value!r:.80}, expected an object")
        hints = _hints(typing.cast(Any, hint))
        scalars = _scalars(typing.cast(Any, hint))
        arguments = {name: value[name] for name, kind in scalars if name in value and type(value[name]) is kind}
        for field in fields(hint):
            if field.name in arguments:
                continue
            if field.name in value:
                arguments[field.name] = _decode(hints[field.name], value[field.name], f"{what}.{field.name}")
            elif field.default is MISSING and field.default_factory is MISSING:
                if not isinstance(hints[field.name], types.UnionType):
                    raise DataError(f"{what}.{field.name} is missing, expected {getattr(hints[field.name], '__name__', hints[field.name])}")
                arguments[field.name] = None
        return typing.cast(Any, hint)(**arguments)
    if origin is tuple:
        if not isinstance(value, list):
            raise DataError(f"{what} is {value!r:.80}, expected a list")
        return tuple(_decode(typing.get_args(hint)[0], item, f"{what}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise DataError(f"{what} is {value!r:.80}, expected an object")
        return value
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            raise DataError(f"{what} is {value!r:.80}, expected one of {', '.join(str(item.value) for item in hint)}") from None
    if hint is object or hint is Any:
        return value
    if type(value) is not hint:
        raise DataError(f"{what} is {value!r:.80}, expected {getattr(hint, '__name__', hint)}")
    return value
