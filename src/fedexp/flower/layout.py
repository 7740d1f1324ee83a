"""`Layout`: the conversion between named arrays of a record and the flat vectors of rules.

A vector has the parameters in the order of their names in the record, each flattened in C order. A
parameter with several names (tied weights) is in the vector once, so that norms count it once, as
in the simulator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedexp.errors import UsageError, require, shown
from fedexp.objective import Buffers

Kind = Literal["parameter", "averaged", "kept", "tied"]
Arrays = Mapping[str, NDArray[Any]]

STATISTICS = ("running_mean", "running_var")  # of BatchNorm and InstanceNorm


class Slot(NamedTuple):
    """One array of the record; `source` names the parameter that a tied one repeats."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: Kind
    source: str = ""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Layout:
    """The arrays of a model, and how the server treats each.

    Rules step along parameters; `averaged` arrays are means over clients; `kept` ones (integers,
    booleans) never change; `tied` ones repeat a parameter under another name.

    >>> layout = Layout.of({"w": np.ones((2, 2), "float32"), "bn.running_mean": np.zeros(2)})
    >>> layout.dim, layout.parameters, layout.averaged
    (4, ('w',), ('bn.running_mean',))
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(
        cls,
        arrays: ArrayRecord | Arrays,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> Layout:
        """Return the layout of a model.

        Args:
            arrays: its arrays by name, as in a `state_dict`.
            buffers: names of the arrays that are averaged and never extrapolated; when None, those
                called `running_mean` and `running_var`.
            tied: maps each further name of a parameter to its first name; see `named_parts`.
        """
        slots = tuple(
            Slot(name, value.shape, value.dtype, "parameter")
            for name, value in ndarrays(arrays).items()
        )
        return cls(slots).with_kinds(buffers, tied or {})

    def with_kinds(self, buffers: Collection[str] | None, tied: Mapping[str, str]) -> Layout:
        """Return the layout of the same arrays with other buffers and ties."""
        by_name = {slot.name: slot for slot in self.slots}
        for option, names in {"buffers": buffers or (), "tied": [*tied, *tied.values()]}.items():
            unknown = sorted(set(names) - by_name.keys())
            listed = shown(", ".join(unknown), 200)
            require(not unknown, f"{option} names {listed}, which the model does not have")
        kinds = {name: _kind(name, slot.dtype, buffers) for name, slot in by_name.items()}
        for name, source in tied.items():
            valid = source not in tied and kinds[name] == kinds[source] == "parameter"
            require(
                valid and by_name[name].shape == by_name[source].shape,
                f"{name!r} cannot be tied to {source!r}: both must be parameters of one shape, and "
                f"{source!r} must not be tied itself",
            )
        for name in tied:
            kinds[name] = "tied"
        slots = tuple(
            slot._replace(kind=kinds[slot.name], source=tied.get(slot.name, ""))
            for slot in self.slots
        )
        require(any(slot.kind == "parameter" for slot in slots), "the model has no parameters")
        return Layout(slots)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the trained parameters, in order."""
        return tuple(slot.name for slot in self._of_kind("parameter"))

    @property
    def averaged(self) -> tuple[str, ...]:
        """Names of the buffers that are averaged: floating point."""
        return tuple(slot.name for slot in self._of_kind("averaged"))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the buffers that the server leaves unchanged: integers."""
        return tuple(slot.name for slot in self._of_kind("kept"))

    @property
    def tied(self) -> dict[str, str]:
        """Return the further names of parameters, each with the first name."""
        return {slot.name: slot.source for slot in self._of_kind("tied")}

    @property
    def dim(self) -> int:
        """Return d, the number of entries of all parameters."""
        return sum(slot.size for slot in self._of_kind("parameter"))

    def offsets(self) -> dict[str, int]:
        """Return where each parameter begins in the vector."""
        slots = self._of_kind("parameter")
        starts = np.cumsum([0, *(slot.size for slot in slots)])
        return {slot.name: int(start) for slot, start in zip(slots, starts, strict=False)}

    def flat(self, arrays: ArrayRecord | Arrays) -> Tensor:
        """Return the parameters as one vector [d], in float32 or wider."""
        return self._vector(ndarrays(arrays), "parameter")

    def buffers(self, arrays: ArrayRecord | Arrays) -> Buffers:
        """Return the buffers, one vector per kind."""
        named = ndarrays(arrays)
        return Buffers(self._vector(named, "averaged"), self._vector(named, "kept"))

    def arrays(self, params: Tensor, buffers: Buffers) -> ArrayRecord:
        """Return a record with the names, shapes and types of this layout."""
        named = self._pieces(params, "parameter") | self._pieces(buffers.averaged, "averaged")
        named |= self._pieces(buffers.kept, "kept")
        named |= {
            slot.name: named[slot.source].astype(slot.dtype) for slot in self._of_kind("tied")
        }
        return ArrayRecord({slot.name: Array(named[slot.name]) for slot in self.slots})

    def rounded(self, params: Tensor) -> Tensor:
        """Return the parameters rounded to the types of the record, as clients receive them."""
        slots = self._of_kind("parameter")
        if all(slot.dtype == _width(slots) for slot in slots):
            return params
        return self._vector(self._pieces(params, "parameter"), "parameter")

    def misfit(self, arrays: Arrays) -> str | None:
        """Return why these arrays do not fit the model; None where they do.

        Another precision is not a reason: floats are cast to the type of the model.
        """
        if missing := [slot.name for slot in self.slots if slot.name not in arrays]:
            return f"it has no array {missing[0]!r}"
        if surplus := arrays.keys() - {slot.name for slot in self.slots}:
            return f"it has an array {min(surplus)!r}, which the model does not have"
        for slot in self.slots:
            shape, dtype = arrays[slot.name].shape, arrays[slot.name].dtype
            if shape != slot.shape:
                return f"{slot.name!r} has shape {shape} instead of {slot.shape}"
            if (dtype.kind == "f") != (slot.dtype.kind == "f"):
                return f"{slot.name!r} is of type {dtype} instead of {slot.dtype}"
            if dtype.kind not in "fiub":
                return f"{slot.name!r} is of type {dtype}, which is not a type of numbers"
        if broken := self.broken_ties(arrays):
            source = self.tied[broken[0]]
            return (
                f"{broken[0]!r} differs from {source!r}, to which it is tied; give the strategy "
                "tied={}, or model="
            )
        return None

    def broken_ties(self, arrays: Arrays) -> list[str]:
        """Return the names of tied arrays that differ from the parameter they should repeat."""
        return [
            slot.name
            for slot in self._of_kind("tied")
            if not _equal(arrays[slot.name], arrays[slot.source])
        ]

    def _of_kind(self, kind: Kind) -> list[Slot]:
        return [slot for slot in self.slots if slot.kind == kind]

    def _vector(self, named: Arrays, kind: Kind) -> Tensor:
        slots = self._of_kind(kind)
        dtype = np.dtype(np.int64) if kind == "kept" else _width(slots)
        parts = [np.empty(0, dtype), *(named[slot.name].ravel() for slot in slots)]
        with np.errstate(over="ignore"):  # what overflows here is infinite, and refused
            return torch.from_numpy(np.concatenate(parts, dtype=dtype, casting="unsafe"))

    def _pieces(self, vector: Tensor, kind: Kind) -> dict[str, NDArray[Any]]:
        slots = self._of_kind(kind)
        parts = np.split(vector.cpu().numpy(), np.cumsum([slot.size for slot in slots])[:-1])
        with np.errstate(over="ignore"):  # what overflows float16 is infinite, and refused
            return {
                slot.name: part.reshape(slot.shape).astype(slot.dtype)
                for slot, part in zip(slots, parts, strict=False)
            }


def ndarrays(arrays: ArrayRecord | Arrays) -> dict[str, NDArray[Any]]:
    """Return the arrays by name, decoded where they are in a record."""
    return {
        name: value.numpy() if isinstance(value, Array) else np.asarray(value)
        for name, value in arrays.items()
    }


def loaded(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return the arrays of a received record; raise `UsageError` where they cannot be read."""
    try:
        arrays = ndarrays(record)
    except Exception as error:  # numpy raises many types for damaged bytes
        raise UsageError(f"its arrays cannot be read ({type(error).__name__})") from error
    plain = all(isinstance(value, np.ndarray) for value in arrays.values())
    require(plain, "an array is not a plain one of numpy")  # numpy also reads archives
    return arrays


def to_record(vectors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return the vectors of a client rule as a record."""
    return ArrayRecord({name: Array(value.numpy()) for name, value in vectors.items()})


def to_vector(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return an array of floats as a tensor; torch has no long double and no other byte order."""
    with np.errstate(over="ignore"):  # what overflows is infinite, and refused
        return torch.from_numpy(array.astype(np.float64)).to(dtype)


def same_arrays(one: ArrayRecord, other: ArrayRecord) -> bool:
    """Return whether two records have the same names and values."""
    return one.keys() == other.keys() and all(
        one[k].data == other[k].data or np.array_equal(one[k].numpy(), other[k].numpy())
        for k in one
    )


def named_parts(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Return the names of a model's float buffers, and its ties: the first name of each parameter
    by its further names.

    >>> layer = nn.Linear(2, 2)
    >>> named_parts(nn.Sequential(layer, nn.BatchNorm1d(2), layer))
    (['1.running_mean', '1.running_var'], {'2.weight': '0.weight', '2.bias': '0.bias'})
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            tied[name] = first[id(param)]
    parameters = {*first.values(), *tied}
    others = {n: v for n, v in model.state_dict().items() if n not in parameters}
    floats = [n for n, v in others.items() if isinstance(v, Tensor) and v.is_floating_point()]
    return floats, tied


def apparent_ties(
    arrays: ArrayRecord | Arrays, buffers: Collection[str] | None = None
) -> dict[str, str]:
    """Return the parameters that seem to be tied: arrays equal to the bit and not constant.

    Two random arrays are never equal. Training shows whether they stay so.
    """
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, value in ndarrays(arrays).items():
        if value.dtype.kind != "f" or _kind(name, value.dtype, buffers) != "parameter":
            continue
        if value.size > 1 and (value != value.flat[0]).any():
            digest = hashlib.sha256(value.tobytes()).digest()
            source = first.setdefault((value.shape, value.dtype.str, digest), name)
            if source != name:
                tied[name] = source
    return tied


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two arrays are of floats and equal, with NaN equal to NaN."""
    floats = one.dtype.kind == other.dtype.kind == "f"  # equal_nan is for floats only
    return floats and np.array_equal(one, other, equal_nan=True)


def _kind(name: str, dtype: np.dtype[Any], buffers: Collection[str] | None) -> Kind:
    if dtype.kind in "iub":
        return "kept"
    if dtype.kind != "f" or dtype.itemsize > 8:  # torch has no wider floats
        raise UsageError(
            f"{name!r} is of type {dtype}; arrays must be of booleans, integers or floats of at "
            "most 64 bits"
        )
    is_buffer = name.rpartition(".")[2] in STATISTICS if buffers is None else name in buffers
    return "averaged" if is_buffer else "parameter"


def _width(slots: Iterable[Slot]) -> np.dtype[Any]:
    """Return float32, or float64 where any of the slots is wider."""
    return np.result_type(np.float32, *(slot.dtype for slot in slots))
