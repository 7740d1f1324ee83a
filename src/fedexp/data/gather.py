"""Single examples, however a library hands them out, into one array per field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedexp.data.checks import as_tensors
from fedexp.data.image_file import planes
from fedexp.errors import UsageError, require


def offsets(sizes: Iterable[int]) -> NDArray[np.int64]:
    """Where each client's examples begin, and where the last one's end.

    >>> offsets([2, 1]).tolist()
    [0, 2, 3]
    """
    return np.cumsum([0, *sizes], dtype=np.int64)


def stack(examples: Iterable[Mapping[str, Any]], total: int) -> dict[str, Tensor]:
    """One tensor per field, filled example by example; all examples must be alike.

    >>> stack([{"x": [1, 2], "y": 0}, {"x": [3, 4], "y": 1}], 2)["x"].tolist()
    [[1, 2], [3, 4]]
    """
    filled: dict[str, NDArray[Any]] = {}
    done = 0
    for i, example in enumerate(islice(examples, total)):
        for name, value in example.items():
            array = as_array(value)
            if i == 0:
                filled[name] = np.empty((total, *array.shape), array.dtype)
            _check_alike(array, filled[name], f"field {name!r} of example {i}")
            filled[name][i] = array
        done = i + 1
    require(done == total, f"the data says it has {total} examples, but gives {done}")
    return as_tensors(filled)


def _check_alike(array: NDArray[Any], filled: NDArray[Any], what: str) -> None:
    """Refuse an example that would not fit among the others, or only with its fractions cut off."""
    if array.shape != filled.shape[1:]:
        raise UsageError(
            f"{what} has shape {array.shape}, not {filled.shape[1:]} as the first; "
            "bring the examples to one shape"
        )
    if not np.can_cast(array.dtype, filled.dtype, "same_kind"):
        raise UsageError(
            f"{what} is {array.dtype}, not {filled.dtype} as the first; "
            "bring the examples to one type"
        )


def indexed(
    dataset: Any, rows: Iterable[np.int64], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The examples of a data set that gives a tuple for an index, with its entries named."""
    for row in rows:
        try:
            example = dataset[int(row)]
        except IndexError as error:
            raise UsageError(f"the data set has no example {row}; give rows it has") from error
        entries = example if isinstance(example, tuple | list) else (example,)
        if len(entries) != len(names):
            raise UsageError(f"an example has {len(entries)} entries, but {len(names)} are named")
        yield dict(zip(names, entries, strict=True))


def as_array(value: Any) -> NDArray[Any]:
    """An array, tensor, number, list, or image of the pillow library, as an array.

    An image becomes bytes (channels, rows, columns). Numbers and lists become int64, or float32
    where they have fractions, as torch would have it.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if hasattr(value, "getbands"):  # an image, without importing pillow to ask
        return planes(value)
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def columns(partitions: Sequence[Any], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The examples of all partitions, client after client, with the columns renamed to fields."""
    for partition in partitions:
        for row in partition:
            absent = [column for column in names.values() if column not in row]
            if absent:
                raise UsageError(f"no column {absent[0]!r}; the data has {', '.join(sorted(row))}")
            yield {field: row[column] for field, column in names.items()}
