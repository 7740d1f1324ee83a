"""Single examples, however a library hands them out, into one array per field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.data.image_file import planes
from fedexp.errors import UsageError


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
    for i, example in enumerate(islice(examples, total)):
        for name, value in example.items():
            array = as_array(value)
            if i == 0:
                filled[name] = np.empty((total, *array.shape), array.dtype)
            if array.shape != filled[name].shape[1:]:
                raise UsageError(
                    f"field {name!r} of example {i} has shape {array.shape}, not "
                    f"{filled[name].shape[1:]} as the first; bring the examples to one shape"
                )
            filled[name][i] = array
    return {name: torch.from_numpy(array) for name, array in filled.items()}


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
