"""Text to typed values, by type hints: how options find their types."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

from fedexp.errors import UsageError

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def hints_of(target: Callable[..., Any]) -> dict[str, Any]:
    """The resolved type hints of a dataclass or function."""
    return typing.get_type_hints(target)


def convert(value: Any, hint: Any, name: str) -> Any:
    """`value` as the type that `hint` asks for; text is parsed, other values are checked.

    >>> convert("0.1", float, "eps"), convert("none", int | None, "epochs"), convert("3", int, "k")
    (0.1, None, 3)
    >>> convert("abc", float, "eps")
    Traceback (most recent call last):
    fedexp.errors.UsageError: eps must be a number, not 'abc'
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_optional(value, typing.get_args(hint), name)
    if origin is Literal:
        return _convert_choice(value, typing.get_args(hint), name)
    if hint is bool:
        return _convert_bool(value, name)
    if origin is tuple:
        return _convert_tuple(value, typing.get_args(hint), name)
    if hint in (int, float):
        return _convert_number(value, hint, name)
    return value


def _convert_optional(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return None
    (kind,) = (choice for choice in choices if choice is not type(None))
    return convert(value, kind, name)


def _convert_choice(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    if value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
    return value


def _convert_bool(value: Any, name: str) -> bool:
    text = str(value).lower()
    if text not in TRUE + FALSE:
        raise UsageError(f"{name} must be true or false, not {value!r}")
    return text in TRUE


def _convert_tuple(value: Any, kinds: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value)
    if len(parts) != len(kinds):
        raise UsageError(f"{name} takes {len(kinds)} numbers separated by commas, not {value!r}")
    return tuple(convert(part, kind, name) for part, kind in zip(parts, kinds, strict=True))


def _convert_number(value: Any, kind: type, name: str) -> Any:
    what = "a whole number" if kind is int else "a number"
    if kind is int and isinstance(value, str) and value.lstrip("+-").isdecimal():
        return int(value)  # not through a float, which cannot hold large ones
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be {what}, not {value!r}") from None
    whole = math.isfinite(number) and number == int(number)
    if math.isnan(number) or (kind is int and not whole):
        raise UsageError(f"{name} must be {what}, not {value!r}")
    return kind(number)
