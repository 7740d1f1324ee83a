"""What a federation must be: fields of one length, clients that own some, and each example once.

Single examples, however a library hands them out, into one array per field.

`Federation`: the examples of all clients, in one array per field.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.data.partition import by_id
from fedexp.data.sources import cache
from fedexp.data.sources.image_file import planes
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


def renamed_columns(
    partitions: Sequence[Any], names: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """The examples of all partitions, client after client, with the columns renamed to fields."""
    for partition in partitions:
        for row in partition:
            absent = [column for column in names.values() if column not in row]
            if absent:
                raise UsageError(f"no column {absent[0]!r}; the data has {', '.join(sorted(row))}")
            yield {field: row[column] for field, column in names.items()}


Batch = Mapping[str, Tensor]
OFFSETS = "offsets"  # what a saved federation calls its offsets, beside its fields
FINITE = "finite"  # what its note says: its fractions were checked before it was saved


@dataclass(frozen=True, eq=False)
class Federation:
    """All clients' examples, contiguous, client after client.

    Attributes:
        fields: named tensors with the examples along the first dimension, e.g. `x` and `y`.
        offsets: client i owns the rows offsets[i] to offsets[i + 1]; every client owns some.
        finite: all fractions are known to be finite; else they are checked, which reads all data.

    >>> f = Federation.from_ids({"x": [[1.0], [2.0], [3.0]]}, ids=["b", "a", "b"])
    >>> f.clients, f.sizes.tolist(), f.client(1)["x"].tolist()
    (2, [1, 2], [[1.0], [3.0]])
    """

    fields: Mapping[str, Tensor]
    offsets: NDArray[np.int64]
    finite: bool = field(default=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        check_offsets(self.offsets)
        check_fields(self.fields, total=int(self.offsets[-1]))
        if not self.finite:
            check_finite(self.fields)

    @classmethod
    def from_parts(
        cls, fields: Mapping[str, Any], parts: Sequence[NDArray[np.int64]]
    ) -> Federation:
        """Give client i the rows `parts[i]`; what a partition returns fits here."""
        tensors = as_tensors(fields)
        rows = torch.from_numpy(rows_of(parts, check_fields(tensors)))
        columns = {name: value[rows] for name, value in tensors.items()}
        return cls(columns, offsets(map(len, parts)))

    @classmethod
    def from_ids(cls, fields: Mapping[str, Any], ids: Sequence[Any]) -> Federation:
        """Give each example to the client it names; clients are in the order of their ids."""
        tensors = as_tensors(fields)
        rows = check_fields(tensors)
        require(len(ids) == rows, f"there are {len(ids)} ids for {rows} examples; give each one")
        return cls.from_parts(tensors, by_id(ids))

    @classmethod
    def from_torch_dataset(
        cls,
        dataset: Any,
        parts: Sequence[NDArray[np.int64]],
        names: Sequence[str] = ("x", "y"),
    ) -> Federation:
        """Give client i the examples `parts[i]` of a torch `Dataset` that is read by index.

        Args:
            dataset: gives a tuple for an index, e.g. an image and a label. Images of the pillow
                library become bytes (channels, rows, columns).
            parts: the examples of each client, as a partition returns them.
            names: what the entries of the tuple are called.
        """
        rows = rows_of(parts, len(dataset) if hasattr(dataset, "__len__") else None)
        examples = indexed(dataset, rows, names)
        return cls(stack(examples, len(rows)), offsets(map(len, parts)))

    @classmethod
    def from_flower(cls, partitioner: Any, columns: Mapping[str, str] | None = None) -> Federation:
        """Take the clients of a partitioner of Flower Datasets.

        Args:
            partitioner: an object with `num_partitions` and `load_partition(i)`, and with its
                data set assigned.
            columns: the partitions' column for each field; by default {"x": "img", "y": "label"}.
        """
        columns = columns or {"x": "img", "y": "label"}
        partitions = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
        ends = offsets(map(len, partitions))
        return cls(stack(renamed_columns(partitions, columns), int(ends[-1])), ends)

    @classmethod
    def from_image_folder(
        cls,
        path: str | os.PathLike[str],
        client: int | Callable[[PurePath], Any] = 0,
        classes: Sequence[str] | None = None,
        size: tuple[int, int] | None = None,
        mode: str = "RGB",
    ) -> Federation:
        """Read a folder of images, in which an image's label is the name of the folder it lies in.

        `client=0` reads `path/<client>/<class>/*.png`. For `path/<class>/*.png`, give a function,
        e.g. `client=lambda p: p.stem.split("-")[0]` for files called `<client>-<number>.png`.

        Args:
            path: the folder.
            client: which level of sub-folders names the client, 0 for the outermost; or a function
                of the image's path below `path`, whose values are the clients.
            classes: the names of the classes in the order of their labels; by default those that
                occur, sorted. Give them where training and test folders must agree.
            size: rows and columns that images are brought to; by default all must be alike.
            mode: "RGB" for colour or "L" for grey.
        """
        from fedexp.data.sources.cinic import read_folder

        fields, ids = read_folder(Path(path), client, classes, size, mode)
        return cls.from_ids(fields, ids)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Federation:
        """Map a federation that `save` wrote: at once, and shared by all processes that do."""
        arrays, note = cache.read(Path(path))
        if OFFSETS not in arrays:
            raise UsageError(f"{path}: is not a saved federation; make it with Federation.save")
        ends = np.array(arrays.pop(OFFSETS))
        try:
            return cls(as_tensors(arrays), ends, finite=note.get(FINITE) is True)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the federation to one file, an `.npz` that `open` maps; whole or not at all."""
        require(OFFSETS not in self.fields, f"a field called {OFFSETS!r} cannot be saved")
        fields = {name: value.cpu().numpy() for name, value in self.fields.items()}
        cache.write(Path(path), {**fields, OFFSETS: self.offsets}, {FINITE: True})

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The number of examples of each client."""
        return np.diff(self.offsets)

    @cached_property
    def largest(self) -> int:
        """The number of examples of the largest client."""
        return int(self.sizes.max())

    def client(self, index: int) -> Batch:
        """All examples of a client, without a copy."""
        require(0 <= index < self.clients, f"no client {index}; they are 0 to {self.clients - 1}")
        own = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return {name: value[own] for name, value in self.fields.items()}

    def batch(self, index: int, rows: NDArray[np.int64]) -> Batch:
        """Some examples of a client, by their position among its own."""
        picked = torch.from_numpy(rows + self.offsets[index])
        return {name: value[picked] for name, value in self.fields.items()}

    @property
    def device(self) -> torch.device:
        """Where examples are handed out."""
        return next(iter(self.fields.values())).device

    def places(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the rows of clients begin, among those that a program works on."""
        return self.offsets[clients]

    def travelling(self, clients: Sequence[int]) -> Batch:
        """Rows that a program needs beside the fields; none, as they are where it runs."""
        return {}

    def prepare(self, clients: Sequence[int]) -> None:
        """Get ready what `travelling` will be asked for."""

    def example_weights(self, by_size: bool) -> Tensor:
        """A weight for every example, so that a weighted sum is the objective F.

        Uniform clients: each client's mean counts the same, 1 / (M n_i). By size: 1 / n.
        """
        sizes = torch.from_numpy(self.sizes).to(torch.float64)
        per_client = torch.full_like(sizes, 1 / float(sizes.sum()))
        if not by_size:
            per_client = 1 / (self.clients * sizes)
        return per_client.repeat_interleave(torch.from_numpy(self.sizes))
