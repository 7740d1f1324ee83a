"""Objectives: the protocols that engines ask for, and the flat vectors they work on.

All parameters of a model are one vector: norms are over the whole model by construction, and a step
of any rule is one operation. Buffers are passed beside it and are never extrapolated. In the vector
the weights of a convolution, [O, C, KH, KW], are stored with their channels last, as
[O, KH, KW, C]: the order in which fast convolutions read them, so that no step has to permute them.

`Objective` is what every engine needs. The other protocols declare what a faster engine, a device
or a stored model needs besides; `isinstance` tests whether an objective provides it. None of them
has a property that computes something, which keeps that test cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

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
        return cls(torch.empty(0), torch.empty(0, dtype=torch.int64))


class Objective(Protocol):
    """What a client minimises: a loss of a flat parameter vector and a batch."""

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        """Return the initial model, a pure function of the seed."""
        ...

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        """Return the gradient of the local loss, and the buffers after the forward pass."""
        ...

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        """Return per-example values in evaluation mode: `loss`, and `accuracy` of classifiers."""
        ...


@runtime_checkable
class DeviceObjective(Objective, Protocol):
    """An objective that can change devices."""

    def on(self, device: torch.device, precision: Precision) -> Objective:
        """Return a copy on the device, which computes in the precision."""
        ...


@runtime_checkable
class LoadableObjective(Objective, Protocol):
    """An objective whose trained model is an `nn.Module`."""

    def load(self, params: Tensor, buffers: Buffers) -> nn.Module:
        """Return a new module with these parameters and buffers."""
        ...


@runtime_checkable
class StartableObjective(Objective, Protocol):
    """An objective that can start from given weights."""

    def starting_at(self, params: Tensor, buffers: Buffers) -> Objective:
        """Return a copy whose `initial` returns this model, whatever the seed."""
        ...


@runtime_checkable
class CopyableObjective(Objective, Protocol):
    """An objective with a module as scratch space: what one copy per thread needs."""

    @property
    def module(self) -> nn.Module: ...

    def copy(self, dtype: torch.dtype | None = None, dropout: bool = True) -> CopyableObjective:
        """Return an objective with a module of its own.

        Args:
            dtype: type of its parameters, in which its layers compute; None for no change.
            dropout: whether dropout layers are active.
        """
        ...


@runtime_checkable
class BatchedObjective(Objective, Protocol):
    """An objective that computes the gradients of many clients at once."""

    def batching_pays(self, device: torch.device) -> bool:
        """Return whether many clients at once are faster than one by one on such a device."""
        ...

    def gradients(
        self, params: Tensor, buffers: Buffers, batch: Batch, valid: Tensor
    ) -> tuple[Tensor, Buffers]:
        """Return the gradients of K clients: every argument has a leading dimension K.

        `valid` [K, B] is 1 for an example and 0 for padding of a shorter batch.
        """
        ...


@runtime_checkable
class StackedObjective(BatchedObjective, Protocol):
    """An objective whose layers may have stacked implementations, with the weights of K clients."""

    def mixes_examples(self) -> bool:
        """Return whether layers normalise over the batch, so that padding would be seen."""
        ...

    def has_stacked_layers(self) -> bool:
        """Return whether every layer has a stacked implementation."""
        ...

    def stacked_clients(
        self, params: Tensor, batch: Batch, valid: Tensor, fuse: bool = False
    ) -> StackedClients:
        """Return K clients at `params` [K, d], stored layer by layer.

        Args:
            params: the parameters, maybe with zeros behind them.
            batch: the first batch, from which kernels are compiled.
            valid: as in `gradients`.
            fuse: let `torch.compile` merge what is between the layers of a small model.
        """
        ...

    def evaluate_stacked(self, enabled: bool) -> None:
        """Let `measure` use the stacked layers, once they are known to give the same values."""
        ...

    def row_multiple(self) -> int:
        """Return what the length of parameter rows should be a multiple of on this device."""
        ...


@runtime_checkable
class DenseObjective(Objective, Protocol):
    """An objective that may be a plain dense classifier."""

    def dense_network(self) -> DenseNetwork | None:
        """Return the network; None where it is not a plain sequence of dense layers."""
        ...


@runtime_checkable
class QuadraticObjective(Objective, Protocol):
    """An objective that is quadratic in the parameters."""

    def linear_steps(self, batch: Batch) -> LinearSteps:
        """Return any number of steps on the whole data of K clients, as one map."""
        ...


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
    if not tensors:
        return torch.empty(0)
    channels_last = [t.movedim(lead + 1, -1) if t.ndim == lead + 4 else t for t in tensors]
    flat = [t.flatten(lead) if t.ndim > lead else t[None] for t in channels_last]
    return torch.cat(flat, dim=lead)


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
