"""`Federation`: the examples of all clients, in one tensor per field.

Clients are contiguous ranges of rows, so a client is a slice and a federation of millions of
clients is a few arrays. The constructors take examples in any common shape (arrays with ids or
partitions, torch data sets, Flower partitioners, folders of images) and refuse data that would be
misread: fields of different lengths, empty clients, rows of two clients, non-finite values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from numbers import Integral
from pathlib import Path, PurePath
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.data.partition import by_id
from fedexp.data.sources import cache
from fedexp.data.sources.image_file import planes
from fedexp.errors import UsageError, require

Batch = Mapping[str, Tensor]
"""A batch of examples: fields by name, each of shape [B, ...]."""
OFFSETS = "offsets"  # name of the offsets in a saved federation, next to its fields
FINITE = "finite"  # flag in a saved federation: its floats were checked before saving
NO_CLIENTS = "a federation needs at least one client"
ROWS_PER_CHECK = 2**16  # data may be larger than memory, so checks read them in blocks


@runtime_checkable
class Partitioner(Protocol):
    """What is used of a partitioner of Flower Datasets; its data set is assigned before."""

    def load_partition(self, partition_id: int, /) -> Any: ...

    @property
    def num_partitions(self) -> int: ...


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """All clients' examples, stored contiguously in client order.

    Attributes:
        fields: named tensors with the examples along the first dimension, e.g. `x` and `y`.
        offsets: client i owns the rows offsets[i] to offsets[i + 1]; every client owns some.
        finite: whether all floats are known to be finite; if not, they are checked, which reads all
            data.

    >>> f = Federation.from_ids({"x": [[1.0], [2.0], [3.0]]}, ids=["b", "a", "b"])
    >>> f.clients, f.sizes.tolist(), f.client(1)["x"].tolist()
    (2, [1, 2], [[1.0], [3.0]])
    """

    fields: Mapping[str, Tensor]
    offsets: NDArray[np.int64]
    finite: bool = field(default=False, repr=False, kw_only=True)

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name} {str(value.dtype).removeprefix('torch.')} {list(value.shape[1:])}"
            for name, value in self.fields.items()
        )
        count = int(self.offsets[-1])
        return f"{type(self).__name__}({self.clients:,} clients, {count:,} examples: {fields})"

    def __post_init__(self) -> None:
        check_offsets(self.offsets)
        check_fields(self.fields, total=int(self.offsets[-1]))
        if not self.finite:
            check_finite(self.fields)

    @classmethod
    def from_parts(
        cls, fields: Mapping[str, Any], parts: Sequence[NDArray[np.int64]]
    ) -> Federation:
        """Give client i the rows `parts[i]`, as `fedexp.data.partition` returns them."""
        tensors = as_tensors(fields)
        rows = torch.from_numpy(rows_of(parts, check_fields(tensors)))
        columns = {name: value[rows] for name, value in tensors.items()}
        return cls(columns, offsets_of(map(len, parts)))

    @classmethod
    def from_ids(cls, fields: Mapping[str, Any], ids: Sequence[Any] | NDArray[Any]) -> Federation:
        """Give each example to the client with its id; clients are sorted by id."""
        tensors = as_tensors(fields)
        rows = check_fields(tensors)
        require(hasattr(ids, "__len__"), f"ids is {type(ids).__name__}; give one id per example")
        require(len(ids) == rows, f"there are {len(ids)} ids for {rows} examples; give each one")
        return cls.from_parts(tensors, by_id(ids))

    @classmethod
    def from_torch_dataset(
        cls,
        dataset: Any,
        parts: Sequence[NDArray[np.int64]],
        names: Sequence[str] = ("x", "y"),
    ) -> Federation:
        """Give client i the examples `parts[i]` of a map-style torch `Dataset`.

        Args:
            dataset: returns a tuple for an index, e.g. an image and a label. PIL images become
                uint8 [channels, height, width].
            parts: the examples of each client.
            names: field names of the entries of the tuple.
        """
        from torch.utils.data import IterableDataset  # slow to import

        require(
            hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset),
            f"the data set is {type(dataset).__name__}, which has no examples by index; give a "
            "map-style data set, e.g. a TensorDataset or the one of a DataLoader",
        )
        rows = rows_of(parts, len(dataset) if hasattr(dataset, "__len__") else None)
        examples = indexed(dataset, rows, names)
        return cls(stack(examples, len(rows)), offsets_of(map(len, parts)))

    @classmethod
    def from_flower(
        cls, partitioner: Partitioner, columns: Mapping[str, str] | None = None
    ) -> Federation:
        """Take the partitions of a Flower Datasets partitioner as clients.

        Args:
            partitioner: an object with `num_partitions` and `load_partition(i)`, and with its
                data set assigned.
            columns: column of the partitions for each field; by default {"x": "img", "y": "label"}.
        """
        require(
            isinstance(partitioner, Partitioner),
            f"the partitioner is {type(partitioner).__name__}; give one of Flower Datasets",
        )
        columns = columns or {"x": "img", "y": "label"}
        partitions = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
        ends = offsets_of(map(len, partitions))
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
        """Read a folder of images; an image's label is the name of the folder that contains it.

        `client=0` reads `path/<client>/<class>/*.png`. For `path/<class>/*.png`, give a function,
        e.g. `client=lambda p: p.stem.split("-")[0]` for files named `<client>-<number>.png`.

        Args:
            path: the folder.
            client: level of sub-folders that names the client, 0 for the outermost; or a function
                from the image's path relative to `path` to its client.
            classes: class names in the order of their labels; by default those that occur, sorted.
                Pass them if training and test folders must have the same labels.
            size: height and width that images are resized to; by default all must be equal.
            mode: "RGB" for colour or "L" for greyscale.
        """
        from fedexp.data.sources.image_folder import read_folder

        fields, ids = read_folder(Path(path), client, classes, size, mode)
        return cls.from_ids(fields, ids)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Federation:
        """Memory-map a federation written by `save`; processes share the pages of the file."""
        arrays, note = cache.read(Path(path))
        if OFFSETS not in arrays:
            raise UsageError(f"{path}: is not a saved federation; create it with Federation.save")
        ends = np.array(arrays.pop(OFFSETS))
        try:
            return cls(as_tensors(arrays), ends, finite=note.get(FINITE) is True)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the federation atomically to one `.npz` file, which `open` memory-maps."""
        require(OFFSETS not in self.fields, f"a field named {OFFSETS!r} cannot be saved; rename it")
        fields = {name: value.cpu().numpy() for name, value in self.fields.items()}
        cache.write(Path(path), {**fields, OFFSETS: self.offsets}, {FINITE: True})

    @property
    def clients(self) -> int:
        """The number of clients."""
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
        """Return all examples of a client, without a copy."""
        last = self.clients - 1
        whole = isinstance(index, Integral)
        require(whole and 0 <= index <= last, f"no client {index!r}; clients are 0 to {last}")
        own = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return {name: value[own] for name, value in self.fields.items()}

    def batch(self, index: int, rows: NDArray[np.int64]) -> Batch:
        """Return some examples of a client, by their index among its own."""
        picked = torch.from_numpy(rows + self.offsets[index])
        return {name: value[picked] for name, value in self.fields.items()}

    @property
    def device(self) -> torch.device:
        """The device on which batches are returned."""
        return next(iter(self.fields.values())).device

    def first_rows(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first row of each client in the tensors that a training step indexes."""
        return self.offsets[clients]

    def cohort_rows(self, clients: Sequence[int]) -> Batch:
        """Return rows to copy to the device for a cohort; none, as the fields reside there."""
        return {}

    def prefetch(self, clients: Sequence[int]) -> None:
        """Start to gather what `cohort_rows` will return for the next cohort."""


def check_offsets(offsets: NDArray[np.int64]) -> None:
    """Refuse offsets that do not start at 0 and increase with every client."""
    require(
        isinstance(offsets, np.ndarray) and offsets.ndim == 1 and offsets.dtype.kind == "i",
        "offsets must be an array of whole numbers: the first row of each client, and the end",
    )
    require(len(offsets) > 1, NO_CLIENTS)
    require(int(offsets[0]) == 0, f"offsets must begin with 0, not {offsets[0]}")
    empty = np.flatnonzero(np.diff(offsets) <= 0)
    if len(empty):
        raise UsageError(f"client {empty[0]} has no examples; leave empty clients out")


def check_fields(fields: Mapping[str, Tensor], total: int | None = None) -> int:
    """Return the number of rows, the same in all fields and equal to `total` if it is given."""
    require(len(fields) > 0, "a federation needs at least one field, e.g. x")
    for name, value in fields.items():
        require(isinstance(value, Tensor), f"field {name!r} must be a tensor; or use from_parts")
        require(value.ndim > 0, f"field {name!r} is a single number; give one row per example")
    lengths = {name: len(value) for name, value in fields.items()}
    listed = ", ".join(f"{name!r} has {rows} rows" for name, rows in lengths.items())
    require(len(set(lengths.values())) == 1, f"fields differ in length: {listed}")
    rows = next(iter(lengths.values()))
    require(total in (None, rows), f"the clients own {total} rows, but {listed}")
    return rows


def check_finite(fields: Mapping[str, Tensor], where: str = "") -> None:
    """Refuse floating-point fields with infinite or NaN values."""
    for name, value in fields.items():
        what = f"field {name!r}{where and f' of {where}'}"
        require(all_finite(value), f"{what} holds values that are not finite; clean the data")


def all_finite(value: Tensor) -> bool:
    """Return whether a tensor has neither infinite nor NaN values, looking at it in blocks."""
    if not value.is_floating_point() and not value.is_complex():
        return True
    blocks = value.split(ROWS_PER_CHECK)
    return all(bool(block.isfinite().all()) for block in blocks)


def check_labels(labels: NDArray[Any], classes: int, where: object) -> NDArray[np.int64]:
    """Return the labels as int64; refuse any that is not an integer from 0 to classes - 1."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UsageError(f"{where}: labels are not a list of whole numbers")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise UsageError(
            f"{where}: label {labels[wrong[0]]} of example {wrong[0]} is out of range; "
            f"labels are 0 to {classes - 1}"
        )
    return labels.astype(np.int64)


def as_tensors(fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the fields as tensors that share the memory of arrays."""
    tensors = {}
    require(
        isinstance(fields, Mapping),
        f'the fields are {type(fields).__name__}; give arrays by name, e.g. {{"x": x, "y": y}}',
    )
    for name, value in fields.items():
        try:
            tensors[name] = torch.as_tensor(_as_positions(value))
        except (TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            if _are_texts(value):
                reason = "number texts with numpy.unique(values, return_inverse=True)[1]"
            raise UsageError(f"field {name!r} is not an array of numbers: {reason}") from error
    return tensors


def _as_positions(value: Any) -> Any:
    """Return what torch reads by position; it would read a column of pandas by its labels."""
    if isinstance(value, np.ma.MaskedArray):
        require(not np.ma.is_masked(value), "some of its values are masked; fill or drop them")
        value = np.asarray(value)
    if isinstance(value, Tensor | np.ndarray | Sequence):
        return value
    array = np.asarray(value)
    return array if array.flags.writeable else array.copy()


def _are_texts(value: Any) -> bool:
    """Return whether an array or list holds texts."""
    array = np.asarray(value, dtype=object)
    return array.size > 0 and isinstance(array.flat[0], str | bytes)


def rows_of(parts: Sequence[Any], examples: int | None) -> NDArray[np.int64]:
    """Concatenate the rows of all clients; refuse rows out of range or given out twice.

    Args:
        parts: the rows of each client.
        examples: number of rows there are, or None if unknown.
    """
    require(
        isinstance(parts, Sequence | np.ndarray),
        f"parts is {type(parts).__name__}; give a list with the rows of each client",
    )
    require(len(parts) > 0, NO_CLIENTS)
    rows = np.concatenate([_rows_of_client(part, client) for client, part in enumerate(parts)])
    outside = rows < 0 if examples is None else (rows < 0) | (rows >= examples)
    if outside.any():
        index = int(outside.argmax())
        known = "0 and up" if examples is None else f"0 to {examples - 1}"
        raise UsageError(
            f"client {_owner(parts, index)} is given row {rows[index]}, but rows are {known}"
        )
    if _distinct(rows, examples) < len(rows):
        raise _given_twice(rows, parts)
    return rows


def _rows_of_client(part: Any, client: int) -> NDArray[np.int64]:
    """Return one client's rows as int64; an empty list may have any type."""
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
    """Count the different rows, in one byte per example if their number is known."""
    if examples is None:
        return len(np.unique(rows))
    seen = np.zeros(examples, dtype=np.bool_)
    seen[rows] = True
    return int(np.count_nonzero(seen))


def _given_twice(rows: NDArray[np.int64], parts: Sequence[Any]) -> UsageError:
    ordered = np.sort(rows)
    twice = ordered[:-1][np.diff(ordered) == 0][0]
    first, second = (_owner(parts, int(index)) for index in np.flatnonzero(rows == twice)[:2])
    return UsageError(
        f"row {twice} is given to client {first} and again to client {second}; "
        "an example belongs to one client, once"
    )


def _owner(parts: Sequence[Any], index: int) -> int:
    """Return the client that owns an index of the concatenated rows."""
    ends = np.cumsum([len(part) for part in parts])
    return int(np.searchsorted(ends, index, side="right"))


def offsets_of(sizes: Iterable[int]) -> NDArray[np.int64]:
    """Return the first row of each client, and the end of the last one.

    >>> offsets_of([2, 1]).tolist()
    [0, 2, 3]
    """
    return np.cumsum([0, *sizes], dtype=np.int64)


def stack(examples: Iterable[Mapping[str, Any]], total: int) -> dict[str, Tensor]:
    """Stack examples into one tensor per field; shapes and types must be equal.

    >>> stack([{"x": [1, 2], "y": 0}, {"x": [3, 4], "y": 1}], 2)["x"].tolist()
    [[1, 2], [3, 4]]
    """
    filled: dict[str, NDArray[Any]] = {}
    count = 0
    for i, example in enumerate(islice(examples, total)):
        for name, value in example.items():
            array = as_array(value)
            if i == 0:
                filled[name] = np.empty((total, *array.shape), array.dtype)
            _check_alike(array, filled[name], f"field {name!r} of example {i}")
            filled[name][i] = array
        count = i + 1
    require(count == total, f"the data claims to have {total} examples, but yields {count}")
    return as_tensors(filled)


def _check_alike(array: NDArray[Any], filled: NDArray[Any], what: str) -> None:
    """Refuse an example of another shape, or of a type that would be truncated."""
    if array.shape != filled.shape[1:]:
        raise UsageError(
            f"{what} has shape {array.shape}, not {filled.shape[1:]} as the first; "
            "give all examples one shape"
        )
    # whole numbers must not wrap around; others that become infinite are found later
    if not np.can_cast(
        array.dtype, filled.dtype, "safe" if filled.dtype.kind in "iu" else "same_kind"
    ):
        raise UsageError(
            f"{what} is {array.dtype}, not {filled.dtype} as the first; give all examples one type"
        )


def indexed(
    dataset: Any, rows: Iterable[np.int64], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield examples of a map-style data set of tuples, with the entries named."""
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
    """Convert a tensor, array, number, list or PIL image to an array.

    An image becomes uint8 [channels, height, width]. Numbers and lists become int64 or float32, as
    in torch; bfloat16, which numpy has not, becomes float32.
    """
    if isinstance(value, Tensor):
        value = value.float() if value.dtype == torch.bfloat16 else value
        return value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if hasattr(value, "getbands"):  # a PIL image, recognised without importing PIL
        return planes(value)
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def renamed_columns(
    partitions: Sequence[Any], names: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the examples of all partitions in order, with columns renamed to fields."""
    for partition in partitions:
        for row in partition:
            absent = [column for column in names.values() if column not in row]
            if absent:
                raise UsageError(f"no column {absent[0]!r}; the data has {', '.join(sorted(row))}")
            yield {field: row[column] for field, column in names.items()}
