"""What a federation must be: fields of one length, clients that own some, and each example once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.errors import UsageError, require

NO_CLIENTS = "a federation needs at least one client"
ROWS_AT_A_TIME = 2**16  # of data that may be larger than memory


def check_offsets(offsets: NDArray[np.int64]) -> None:
    """Refuse offsets that do not start at 0 and grow with every client."""
    require(
        isinstance(offsets, np.ndarray) and offsets.ndim == 1 and offsets.dtype.kind == "i",
        "offsets must be an array of whole numbers, where each client begins and the last one ends",
    )
    require(len(offsets) > 1, NO_CLIENTS)
    require(int(offsets[0]) == 0, f"offsets must begin with 0, not {offsets[0]}")
    empty = np.flatnonzero(np.diff(offsets) <= 0)
    if len(empty):
        raise UsageError(f"client {empty[0]} has no examples; leave empty clients out")


def check_fields(fields: Mapping[str, Tensor], total: int | None = None) -> int:
    """The number of rows that all fields have; `total` if it is given."""
    require(len(fields) > 0, "a federation needs at least one field, e.g. x")
    for name, value in fields.items():
        require(isinstance(value, Tensor), f"field {name!r} must be a tensor; or use from_parts")
        require(value.ndim > 0, f"field {name!r} is a single number; give one row an example")
    lengths = {name: len(value) for name, value in fields.items()}
    listed = ", ".join(f"{name!r} has {rows} rows" for name, rows in lengths.items())
    require(len(set(lengths.values())) == 1, f"fields differ in length: {listed}")
    rows = next(iter(lengths.values()))
    require(total in (None, rows), f"the clients own {total} rows, but {listed}")
    return rows


def check_finite(fields: Mapping[str, Tensor]) -> None:
    """Refuse fractions that are infinite or not a number."""
    for name, value in fields.items():
        parts = value.split(ROWS_AT_A_TIME) if value.is_floating_point() else ()
        finite = all(bool(part.isfinite().all()) for part in parts)
        require(finite, f"field {name!r} holds values that are not finite; clean the data")


def as_tensors(fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """The fields as tensors, which share the memory of arrays."""
    tensors = {}
    for name, value in fields.items():
        try:
            tensors[name] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"field {name!r} is not an array of numbers: {reason}") from error
    return tensors


def rows_of(parts: Sequence[Any], examples: int | None) -> NDArray[np.int64]:
    """The rows of all parts, one after the other, if each of them is there and given out once.

    Args:
        parts: the rows of each client.
        examples: how many rows there are, or None where nobody knows.
    """
    require(len(parts) > 0, NO_CLIENTS)
    rows = np.concatenate([_part(part, client) for client, part in enumerate(parts)])
    outside = rows < 0 if examples is None else (rows < 0) | (rows >= examples)
    if outside.any():
        place = int(outside.argmax())
        known = "0 and up" if examples is None else f"0 to {examples - 1}"
        raise UsageError(
            f"client {_owner(parts, place)} is given row {rows[place]}, but rows are {known}"
        )
    if _distinct(rows, examples) < len(rows):
        raise _given_twice(rows, parts)
    return rows


def _part(part: Any, client: int) -> NDArray[np.int64]:
    """One client's rows; an empty list has no numbers that could be of the wrong kind."""
    try:
        rows = np.asarray(part)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the rows of client {client} are not a list of numbers") from error
    require(rows.ndim == 1, f"the rows of client {client} are not a list, but {rows.ndim}-D")
    require(
        rows.dtype.kind in "iu" or rows.size == 0,
        f"the rows of client {client} are {rows.dtype}, not whole numbers; "
        "give the positions of its examples",
    )
    return rows.astype(np.int64, copy=False)


def _distinct(rows: NDArray[np.int64], examples: int | None) -> int:
    """How many different rows there are; costs a byte an example, where their number is known."""
    if examples is None:
        return len(np.unique(rows))
    seen = np.zeros(examples, dtype=np.bool_)
    seen[rows] = True
    return int(np.count_nonzero(seen))


def _given_twice(rows: NDArray[np.int64], parts: Sequence[Any]) -> UsageError:
    ordered = np.sort(rows)
    twice = ordered[:-1][np.diff(ordered) == 0][0]
    first, second = (_owner(parts, int(place)) for place in np.flatnonzero(rows == twice)[:2])
    return UsageError(
        f"row {twice} is given to client {first} and again to client {second}; "
        "an example belongs to one client, once"
    )


def _owner(parts: Sequence[Any], place: int) -> int:
    """The client whose row stands at a place of all parts' rows."""
    ends = np.cumsum([len(part) for part in parts])
    return int(np.searchsorted(ends, place, side="right"))
