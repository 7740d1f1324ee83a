"""`Federation`: the examples of all clients, in one array per field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.errors import require

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Federation:
    """All clients' examples, contiguous, client after client.

    Attributes:
        fields: named tensors with the examples along the first dimension, e.g. `x` and `y`.
        offsets: client i owns the rows offsets[i] to offsets[i + 1]; every client owns some.

    >>> f = Federation.from_ids({"x": [[1.0], [2.0], [3.0]]}, ids=["b", "a", "b"])
    >>> f.clients, f.sizes.tolist(), f.client(1)["x"].tolist()
    (2, [1, 2], [[1.0], [3.0]])
    """

    fields: Mapping[str, Tensor]
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        total = int(self.offsets[-1])
        for name, value in self.fields.items():
            require(len(value) == total, f"field {name!r} has {len(value)} rows, not {total}")
            finite = not value.is_floating_point() or bool(value.isfinite().all())
            require(finite, f"field {name!r} holds values that are not finite; clean the data")
        empty = np.flatnonzero(np.diff(self.offsets) <= 0)
        require(
            len(empty) == 0,
            f"client {empty[0] if len(empty) else ''} has no examples; leave empty clients out",
        )

    @classmethod
    def from_parts(
        cls, fields: Mapping[str, Any], parts: Sequence[NDArray[np.int64]]
    ) -> Federation:
        """Give client i the rows `parts[i]`; what a partition returns fits here."""
        require(len(parts) > 0, "a federation needs at least one client")
        rows = torch.from_numpy(np.concatenate([np.asarray(p, dtype=np.int64) for p in parts]))
        offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        return cls({name: torch.as_tensor(v)[rows] for name, v in fields.items()}, offsets)

    @classmethod
    def from_ids(cls, fields: Mapping[str, Any], ids: Sequence[Any]) -> Federation:
        """Give each example to the client it names; clients are in the order of their ids."""
        _, owner = np.unique(np.asarray(ids), return_inverse=True)
        order = np.argsort(owner, kind="stable")
        return cls.from_parts(fields, np.split(order, np.cumsum(np.bincount(owner))[:-1]))

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The number of examples of each client."""
        return np.diff(self.offsets)

    def client(self, index: int) -> Batch:
        """All examples of a client, without a copy."""
        own = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return {name: value[own] for name, value in self.fields.items()}

    def batch(self, index: int, rows: NDArray[np.int64]) -> Batch:
        """Some examples of a client, by their position among its own."""
        picked = torch.from_numpy(rows + self.offsets[index])
        return {name: value[picked] for name, value in self.fields.items()}

    def example_weights(self, by_size: bool) -> Tensor:
        """A weight for every example, so that a weighted sum is the objective F.

        Uniform clients: each client's mean counts the same, 1 / (M n_i). By size: 1 / n.
        """
        sizes = torch.from_numpy(self.sizes).to(torch.float64)
        per_client = torch.full_like(sizes, 1 / float(sizes.sum()))
        if not by_size:
            per_client = 1 / (self.clients * sizes)
        return per_client.repeat_interleave(torch.from_numpy(self.sizes))
