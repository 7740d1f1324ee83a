"""Objectives: the protocols that engines ask for, and the flat vectors they work on.

All parameters of a model are one vector: norms are over the whole model by construction, and a step
of any rule is one operation. Buffers are passed beside it and are never extrapolated. In the vector
the weights of a convolution, [O, C, KH, KW], are stored with their channels last, as
[O, KH, KW, C]: the order in which fast convolutions read them, so that no step has to permute them.
`Task.to_state_dict`, `Task.to_vector` and `Task.named_views` translate between the two.

`Objective` is what every engine needs. The other protocols declare what a faster engine, a device
or a stored model needs besides; `isinstance` tests whether an objective provides it. None of them
has a property that computes something, which keeps that test cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fedexp.data.federation import Batch
from fedexp.precision import Precision

if TYPE_CHECKING:
    from fedexp.objective.dense import DenseNetwork
    from fedexp.objective.least_squares import LinearSteps
    from fedexp.objective.stack import StackedClients


class Buffers(NamedTuple):
    """A model's buffers: floating-point ones, averaged over clients, and integers, left as is."""

    averaged: Tensor
    kept: Tensor

    @classmethod
    def none(cls) -> Buffers:
        """Return the buffers of a model that has none."""
        return cls(torch.empty(0), torch.empty(0, dtype=torch.int64))


class Objective(Protocol):
    """What a client minimises: a loss of a flat parameter vector and a batch."""

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        """Return the initial model, a pure function of the seed."""

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        """Return the gradient of the local loss, and the buffers after the forward pass."""

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        """Return per-example values in evaluation mode: `loss`, and `accuracy` of classifiers."""


@dataclass(frozen=True)
class Fields:
    """Which fields of a batch the model takes and which ones the loss compares its outputs with.

    Attributes:
        inputs: fields that are passed by position; or a mapping from keyword to field.
        label: the field that is the target; several are passed to the loss as a tuple.

    >>> fields = Fields(("tokens", "mask"), "y")
    >>> fields.names, Fields({"ids": "tokens"}, ("y", "z")).names
    (('tokens', 'mask', 'y'), ('tokens', 'y', 'z'))
    """

    inputs: tuple[str, ...] | Mapping[str, str] = ("x",)
    label: str | tuple[str, ...] = "y"

    @property
    def input_names(self) -> tuple[str, ...]:
        """The fields that the model takes."""
        return tuple(self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The fields that the loss takes."""
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    @property
    def names(self) -> tuple[str, ...]:
        """All fields in use, each once."""
        return tuple(dict.fromkeys((*self.input_names, *self.label_names)))

    def arguments(self, batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the positional and the keyword arguments of the model."""
        if isinstance(self.inputs, Mapping):
            return (), {keyword: batch[name] for keyword, name in self.inputs.items()}
        return tuple(batch[name] for name in self.inputs), {}

    def targets(self, batch: Batch) -> Any:
        """Return the targets of the loss: a tensor, or a tuple of several."""
        if isinstance(self.label, str):
            return batch[self.label]
        return tuple(batch[name] for name in self.label)


DEFAULT_FIELDS = Fields()


@runtime_checkable
class PredictingObjective(Objective, Protocol):
    """An objective whose outputs can be had, so that metrics and losses share a forward pass.

    Attributes:
        per_example: whether the loss has a value for each example. If not, it is a function of a
            batch: batches cannot be padded, and evaluation never mixes the examples of clients.
        classifies: whether `score` returns an accuracy.
    """

    per_example: bool
    classifies: bool

    def predict(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Any, Any]:
        """Return outputs and targets of a batch, in evaluation mode."""

    def score(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return what `measure` returns, from the results of `predict`."""


@runtime_checkable
class CountingObjective(Objective, Protocol):
    """An objective of which a part of an example may count."""

    def counted_parts(self, batch: Batch) -> dict[str, Tensor]:
        """Return the part of each example that counts, [n], by the name of a value of `measure`.

        An evaluation divides the sum of the value by the sum of the parts. Where a value is not
        named, every example counts as one.
        """


@runtime_checkable
class StartableObjective(Objective, Protocol):
    """An objective that can start at given weights."""

    def starting_at(self, params: Tensor, buffers: Buffers) -> Objective:
        """Return a copy whose initial model is this one, whatever the seed."""


@runtime_checkable
class DeviceObjective(Objective, Protocol):
    """An objective that can change devices."""

    def on(self, device: torch.device, precision: Precision) -> Objective:
        """Return a copy on the device, which computes in the precision."""


@runtime_checkable
class LoadableObjective(Objective, Protocol):
    """An objective whose trained model is an `nn.Module`."""

    def load(self, params: Tensor, buffers: Buffers) -> nn.Module:
        """Return a new module with these parameters and buffers."""


@runtime_checkable
class CopyableObjective(Objective, Protocol):
    """An objective with a module as scratch space: what one copy per thread needs."""

    @property
    def module(self) -> nn.Module:
        """The module that computes; its parameters are overwritten."""

    def copy(self, dtype: torch.dtype | None = None, dropout: bool = True) -> CopyableObjective:
        """Return an objective with a module of its own.

        Args:
            dtype: type of its parameters, in which its layers compute; None for no change.
            dropout: whether dropout layers are active.
        """


class Constants(NamedTuple):
    """What the arithmetic of an objective depends on, besides the arguments of its methods.

    Attributes:
        values: the model, the loss and the settings.
        inputs: tensors of the model that the arguments replace: its parameters and buffers.
    """

    values: tuple[Any, ...]
    inputs: tuple[Tensor, ...] = ()


@runtime_checkable
class ComparableObjective(Objective, Protocol):
    """An objective that can be compared with another, so that runs share what was prepared."""

    def constants(self) -> Constants:
        """Return all that its arithmetic depends on; itself where that is not known."""


@runtime_checkable
class BatchedObjective(Objective, Protocol):
    """An objective that computes the gradients of many clients at once."""

    def batching_pays(self, device: torch.device) -> bool:
        """Return whether many clients at once are faster than one by one on such a device."""

    def gradients(
        self, params: Tensor, buffers: Buffers, batch: Batch, valid: Tensor
    ) -> tuple[Tensor, Buffers]:
        """Return the gradients of K clients: every argument has a leading dimension K.

        `valid` [K, B] is 1 for an example and 0 for padding of a shorter batch.
        """


@runtime_checkable
class StackedObjective(BatchedObjective, Protocol):
    """An objective whose layers may have stacked implementations, with the weights of K clients."""

    def mixes_examples(self) -> bool:
        """Return whether layers or the loss see more than one example, padding included."""

    def has_stacked_layers(self) -> bool:
        """Return whether every layer has a stacked implementation."""

    def stacked_clients(self, start: Tensor, clients: int) -> StackedClients:
        """Return K clients with the parameters `start` [d], stored layer by layer.

        Args:
            start: the parameters, maybe with zeros behind them.
            clients: the number of clients K.
        """

    def compile_kernels(self, step: Callable[[], object]) -> None:
        """Compile all kernels that a step launches, at once, where that was not done before.

        Nothing is computed: the results of `step` are undefined.
        """

    def has_sequence_layers(self) -> bool:
        """Return whether kernel launches dominate a step on a GPU: padding then costs little."""

    def evaluate_stacked(self, enabled: bool) -> None:
        """Let `measure` use the stacked layers, once they are known to give the same values."""

    def row_multiple(self) -> int:
        """Return what the length of parameter rows should be a multiple of on this device."""


@runtime_checkable
class DenseObjective(Objective, Protocol):
    """An objective that may be a plain dense classifier."""

    def dense_network(self) -> DenseNetwork | None:
        """Return the network; None where it is not a plain sequence of dense layers."""


@runtime_checkable
class QuadraticObjective(Objective, Protocol):
    """An objective that is quadratic in the parameters."""

    def linear_steps(self, batch: Batch) -> LinearSteps:
        """Return any number of steps on the whole data of K clients, as one map."""


def buffer_changes(after: Tensor, start: Tensor) -> Tensor:
    """Return what local training adds to averaged buffers.

    Changes, not values, enter the sums: a buffer that forward leaves alone (a causal mask with
    -inf, a positional encoding) stays bit-equal and cannot make an update unusable. Where the start
    was not finite (a running maximum), the change is the new value, or 0 where that is not finite.
    """
    new = torch.where(after.isfinite(), after, 0.0)
    return torch.where(start.isfinite(), after - start, new)


def changed_buffers(start: Tensor, change: Tensor) -> Tensor:
    """Return averaged buffers after a mean of `buffer_changes`.

    >>> start = torch.tensor([1.0, -torch.inf, -torch.inf])
    >>> changed_buffers(start, buffer_changes(torch.tensor([3.0, 2.0, -torch.inf]), start)).tolist()
    [3.0, 2.0, -inf]
    """
    new = torch.where(change == 0, start, change)
    return torch.where(start.isfinite(), start + change, new)


def flatten(tensors: Sequence[Tensor], lead: int = 0) -> Tensor:
    """Return one vector of all tensors, or one for each index of the `lead` first dimensions.

    >>> flatten([torch.zeros(2, 3), torch.ones(1)]).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    """
    return torch.cat(flat_parts(tensors, lead), dim=lead) if tensors else torch.empty(0)


def flat_parts(tensors: Sequence[Tensor], lead: int = 0) -> list[Tensor]:
    """Return the parts that `flatten` joins: views of the tensors where possible."""
    channels_last = [t.movedim(lead + 1, -1) if t.ndim == lead + 4 else t for t in tensors]
    return [t.flatten(lead) if t.ndim > lead else t[None] for t in channels_last]


def pieces(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of vectors [..., d] in the shapes of `like`; padding behind is left out."""
    sizes = [t.numel() for t in like]
    parts = vector[..., : sum(sizes)].split(sizes, dim=-1) if like else ()
    return list(map(shaped, parts, [t.shape for t in like]))


def shaped(part: Tensor, shape: torch.Size) -> Tensor:
    """Return a view of slices [..., n] in the shape of their weight."""
    if len(shape) != 4:
        return part.unflatten(-1, shape) if len(shape) else part.squeeze(-1)
    outputs, channels, *window = shape
    return part.unflatten(-1, (outputs, *window, channels)).movedim(-1, -3)


def map_tensors(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Apply a function to the tensors of a model's output, and of outputs of the same structure.

    Outputs are tensors, mappings, tuples, lists and dataclasses of them; other values are copied.

    >>> map_tensors(torch.add, {"a": (torch.tensor(1), "b")}, {"a": (torch.tensor(2), "b")})
    {'a': (tensor(3), 'b')}
    """
    if isinstance(first, Tensor):
        return function(first, *others)
    if isinstance(first, Mapping):
        items = {k: map_tensors(function, v, *(o[k] for o in others)) for k, v in first.items()}
        if not isinstance(first, MutableMapping):
            return items
        mapped = copy(first)
        for key, value in items.items():
            mapped[key] = value
        return mapped
    if isinstance(first, tuple | list):
        values = [map_tensors(function, *parts) for parts in zip(first, *others, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    if is_dataclass(first) and not isinstance(first, type):
        same = copy(first)
        for name in (field.name for field in fields(first)):
            parts = [getattr(value, name) for value in (first, *others)]
            object.__setattr__(same, name, map_tensors(function, *parts))
        return same
    return first


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def as_type(outputs: Any, dtype: torch.dtype) -> Any:
    """Return the outputs of a model in the type of its parameters; in a structure, floats only."""
    if isinstance(outputs, Tensor):
        return outputs.to(dtype)
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, outputs)
