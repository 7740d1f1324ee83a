"""`Layout`: named arrays as they travel, and the flat vectors that rules work on.

The one place that knows how the two belong together: the parameters in the order of their names in
the record, each flattened in C order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from fedexp.errors import UsageError, require
from fedexp.objective import Buffers

Kind = Literal["parameter", "averaged", "kept"]
Arrays = Mapping[str, NDArray[Any]]

STATISTICS = ("running_mean", "running_var")  # of BatchNorm and InstanceNorm


class Slot(NamedTuple):
    """One array of the record."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: Kind

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Layout:
    """Which arrays a model has, and what becomes of each.

    Parameters are what rules extrapolate; `averaged` ones are means over clients; `kept` ones
    (integers, booleans) stay as they were sent first.

    >>> layout = Layout.of({"w": np.ones((2, 2), "float32"), "bn.running_mean": np.zeros(2)})
    >>> layout.dim, layout.parameters, layout.averaged
    (4, ('w',), ('bn.running_mean',))
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, arrays: ArrayRecord | Arrays, buffers: Collection[str] | None = None) -> Layout:
        """The layout of a model.

        Args:
            arrays: its arrays by name, as in a `state_dict`.
            buffers: names of the arrays that are averaged and never extrapolated; when None, those
                called `running_mean` and `running_var`.
        """
        named = ndarrays(arrays)
        unknown = sorted(set(buffers or ()) - named.keys())
        require(not unknown, f"buffers names {', '.join(unknown)}, which the model does not have")
        slots = tuple(
            Slot(name, value.shape, value.dtype, _kind(name, value.dtype, buffers))
            for name, value in named.items()
        )
        require(any(slot.kind == "parameter" for slot in slots), "the model has no parameters")
        return cls(slots)

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self._of_kind("parameter"))

    @property
    def averaged(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self._of_kind("averaged"))

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self._of_kind("kept"))

    @property
    def dim(self) -> int:
        """How many numbers the parameters have."""
        return sum(slot.size for slot in self._of_kind("parameter"))

    def flat(self, arrays: ArrayRecord | Arrays) -> Tensor:
        """The parameters as one vector, in float32 or wider."""
        return self._vector(ndarrays(arrays), "parameter")

    def buffers(self, arrays: ArrayRecord | Arrays) -> Buffers:
        """The buffers, each kind as one vector."""
        named = ndarrays(arrays)
        return Buffers(self._vector(named, "averaged"), self._vector(named, "kept"))

    def arrays(self, params: Tensor, buffers: Buffers) -> ArrayRecord:
        """The record again, with the names, shapes and types it had."""
        named = self._pieces(params, "parameter") | self._pieces(buffers.averaged, "averaged")
        named |= self._pieces(buffers.kept, "kept")
        return ArrayRecord({slot.name: Array(named[slot.name]) for slot in self.slots})

    def rounded(self, params: Tensor) -> Tensor:
        """The parameters as those who receive them see them: in the types of the record."""
        slots = self._of_kind("parameter")
        if all(slot.dtype == _width(slots) for slot in slots):
            return params
        return self._vector(self._pieces(params, "parameter"), "parameter")

    def misfit(self, arrays: Arrays) -> str | None:
        """Why these arrays are not ones of this model; None where they are."""
        if missing := [slot.name for slot in self.slots if slot.name not in arrays]:
            return f"it has no array {missing[0]!r}"
        if surplus := arrays.keys() - {slot.name for slot in self.slots}:
            return f"it has an array {min(surplus)!r} that the model has not"
        for name, shape, dtype, _ in self.slots:
            found = arrays[name]
            if found.shape != shape:
                return f"{name!r} has shape {found.shape} instead of {shape}"
            if found.dtype != dtype:
                return f"{name!r} is of type {found.dtype} instead of {dtype}"
        return None

    def _of_kind(self, kind: Kind) -> list[Slot]:
        return [slot for slot in self.slots if slot.kind == kind]

    def _vector(self, named: Arrays, kind: Kind) -> Tensor:
        slots = self._of_kind(kind)
        dtype = np.dtype(np.int64) if kind == "kept" else _width(slots)
        parts = [np.empty(0, dtype), *(named[slot.name].ravel() for slot in slots)]
        return torch.from_numpy(np.concatenate(parts, dtype=dtype, casting="unsafe"))

    def _pieces(self, vector: Tensor, kind: Kind) -> dict[str, NDArray[Any]]:
        slots = self._of_kind(kind)
        parts = np.split(vector.cpu().numpy(), np.cumsum([slot.size for slot in slots])[:-1])
        with np.errstate(over="ignore"):  # what overflows a half precision is infinite, and refused
            return {
                slot.name: part.reshape(slot.shape).astype(slot.dtype)
                for slot, part in zip(slots, parts, strict=False)
            }


def ndarrays(arrays: ArrayRecord | Arrays) -> dict[str, NDArray[Any]]:
    """The arrays by name, out of their bytes where they are in a record."""
    return {
        name: value.numpy() if isinstance(value, Array) else np.asarray(value)
        for name, value in arrays.items()
    }


def same_arrays(one: ArrayRecord, other: ArrayRecord) -> bool:
    """Whether two records hold the same arrays, to the bit."""
    return one.keys() == other.keys() and all(one[k].data == other[k].data for k in one)


def _kind(name: str, dtype: np.dtype[Any], buffers: Collection[str] | None) -> Kind:
    if dtype.kind in "iub":
        return "kept"
    if dtype.kind != "f":
        raise UsageError(f"{name!r} is of type {dtype}; arrays must be of numbers or booleans")
    is_buffer = name.rpartition(".")[2] in STATISTICS if buffers is None else name in buffers
    return "averaged" if is_buffer else "parameter"


def _width(slots: Iterable[Slot]) -> np.dtype[Any]:
    """Float32, or float64 where any of them is wider."""
    return np.result_type(np.float32, *(slot.dtype for slot in slots))
