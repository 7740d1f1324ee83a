"""Options as text: typed values from text by type hints, and back.

Errors are one line that names the option and what it takes.
"""

from __future__ import annotations

import math
import os
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedexp.errors import UsageError
from fedexp.references import is_reference, load_object, reference_to

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def option_text(value: Any) -> str:
    """Return the value of an option as `--set` takes it: the inverse of `convert`.

    >>> option_text(0.1), option_text(None), option_text((1, 2)), option_text("size")
    ('0.1', 'none', '1,2', 'size')
    """
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return ",".join(map(option_text, value))
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return option_text(value.item())
    if callable(value):
        return reference_to(value, getattr(value, "__name__", "function"))
    return repr(value)


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """Return `{"eps": "0.1"}` for `["eps=0.1"]`."""
    pairs: dict[str, str] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not (equals and key and value):
            raise UsageError(f"--set takes key=value, not {text!r}; for example --set eps=0.01")
        pairs.pop(key.strip(), None)  # repeated, it takes the last place
        pairs[key.strip()] = value.strip()
    return pairs


def convert(value: Any, hint: Any, name: str) -> Any:
    """Return `value` as the type that `hint` asks for; text is parsed, other values are checked.

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
        choices = typing.get_args(hint)
        if value not in choices:
            what = ", ".join(map(str, choices))
            raise UsageError(f"{name} must be one of {what}, not {value!r}")
        return value
    if hint is bool:
        if str(value).lower() not in TRUE + FALSE:
            raise UsageError(f"{name} must be true or false, not {value!r}")
        return str(value).lower() in TRUE
    if origin is tuple:
        return _convert_tuple(value, typing.get_args(hint), name)
    if hint in (int, float):
        return _convert_number(value, hint, name)
    return Path(value) if hint is Path and isinstance(value, str) else value


def _convert_optional(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    """Convert to one of several types: None, a function (by reference), or the first that fits."""
    nothing = value is None or (isinstance(value, str) and value.lower() == "none")
    if nothing and type(None) in choices:
        return None
    functions = [kind for kind in choices if typing.get_origin(kind) is Callable]
    if functions and isinstance(value, str) and is_reference(value):
        value = load_object(value)
    if functions and callable(value):
        return value
    kinds = [kind for kind in choices if kind not in (type(None), *functions)]
    kinds.sort(key=lambda kind: kind in (str, Path))  # which take every text
    errors: list[UsageError] = []
    for kind in kinds:
        try:
            return convert(value, kind, name)
        except UsageError as error:
            errors.append(error)
    raise errors[0]


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
