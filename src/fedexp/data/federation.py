"""`Federation`: the examples of all clients, in one array per field."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.data import cache, checks, gather
from fedexp.data.partition import by_id
from fedexp.errors import UsageError, require

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
        checks.check_offsets(self.offsets)
        checks.check_fields(self.fields, total=int(self.offsets[-1]))
        if not self.finite:
            checks.check_finite(self.fields)

    @classmethod
    def from_parts(
        cls, fields: Mapping[str, Any], parts: Sequence[NDArray[np.int64]]
    ) -> Federation:
        """Give client i the rows `parts[i]`; what a partition returns fits here."""
        tensors = checks.as_tensors(fields)
        rows = torch.from_numpy(checks.rows_of(parts, checks.check_fields(tensors)))
        columns = {name: value[rows] for name, value in tensors.items()}
        return cls(columns, gather.offsets(map(len, parts)))

    @classmethod
    def from_ids(cls, fields: Mapping[str, Any], ids: Sequence[Any]) -> Federation:
        """Give each example to the client it names; clients are in the order of their ids."""
        tensors = checks.as_tensors(fields)
        rows = checks.check_fields(tensors)
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
        rows = checks.rows_of(parts, len(dataset) if hasattr(dataset, "__len__") else None)
        examples = gather.indexed(dataset, rows, names)
        return cls(gather.stack(examples, len(rows)), gather.offsets(map(len, parts)))

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
        ends = gather.offsets(map(len, partitions))
        return cls(gather.stack(gather.columns(partitions, columns), int(ends[-1])), ends)

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
        from fedexp.data.image_folder import read_folder

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
            return cls(checks.as_tensors(arrays), ends, finite=note.get(FINITE) is True)
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
