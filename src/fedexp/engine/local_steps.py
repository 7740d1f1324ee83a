"""Walks: where K clients are in their local training, and how a step moves them.

Parameters are a vector for each client, which every model and rule can do, or lie layer by layer,
which is faster on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.client import ClientRule
from fedexp.data.federation import Batch
from fedexp.kernels.step import Correction, sgd_step, sq_norms
from fedexp.local import LocalTraining, clip_to, local_step
from fedexp.objective import BatchedObjective, Buffers
from fedexp.objective.stack import LayeredStack

Tensors = Mapping[str, Tensor]


class Walk(Protocol):
    """Clients on their way."""

    def step(self, s: int, batch: Batch, lengths: NDArray[np.int64] | None) -> None:
        """Step number s; a client none of whose rows is valid then stays where it is."""
        ...

    def where(self) -> tuple[Tensor, Buffers]:
        """The parameters, a vector for each client, and the buffers."""
        ...


class RowWalk:
    """A vector for each client; gradients are corrected by `advance(params, grads, active)`."""

    def __init__(
        self,
        objective: BatchedObjective,
        params: Tensor,
        buffers: Buffers,
        valid: Tensor,
        advance: Callable[[Tensor, Tensor, Tensor], Tensor],
        all_active: bool,
    ) -> None:
        self.objective, self.advance, self.all_active = objective, advance, all_active
        self.params, self.buffers, self.valid = params, buffers, valid

    def step(self, s: int, batch: Batch, lengths: NDArray[np.int64] | None) -> None:
        objective, params, buffers = self.objective, self.params, self.buffers
        valid = self.valid[s]
        if lengths is None:
            grads, after = objective.gradients(params, buffers, batch, valid)
        else:
            grads, after = _by_length(objective, params, buffers, batch, valid, lengths)
        active = valid[:, :1] > 0
        self.params = self.advance(params, grads, active)
        if not self.all_active and after is not buffers:
            pairs = zip(after, buffers, strict=True)
            after = Buffers(*(torch.where(active, new, old) for new, old in pairs))
        self.buffers = after

    def where(self) -> tuple[Tensor, Buffers]:
        return self.params, self.buffers


class LayerWalk:
    """Layer by layer, moved in place. For models without buffers, and rules with a linear drift."""

    def __init__(
        self,
        stack: LayeredStack,
        buffers: Buffers,
        valid: Tensor,
        rule: ClientRule,
        local: LocalTraining,
        inputs: Tensors,
    ) -> None:
        self.stack, self.buffers, self.local = stack, buffers, local
        prox, offset = rule.linear_correction(
            part(inputs, "broadcast."), part(inputs, "client_state.")
        )
        pushed = None if offset is None else stack.layers.pack(offset)
        self.correction = Correction(prox, inputs["params"], pushed)
        self.lr = inputs["lr"]
        # of all steps at once, and in the type of the parameters: a small model is all launches
        self.counted = valid / valid.sum(dim=2, keepdim=True)
        self.active = valid[:, :, 0] > 0
        self.rates = self.lr.to(stack.params.dtype).repeat(valid.shape[1])
        self.keep = (1 - self.lr * local.weight_decay).to(stack.params.dtype)

    def step(self, s: int, batch: Batch, lengths: NDArray[np.int64] | None) -> None:
        stack, rates, bound = self.stack, self.rates, self.local.clip_norm
        grads = stack.gradients(batch["x"], batch["y"], self.counted[s])
        if bound is not None:
            squared = sq_norms(stack.layers, stack.params, grads, self.correction)
            rates = self.lr * clip_to(squared.sqrt(), bound)
        settings = (self.correction, rates, self.keep, self.active[s])
        sgd_step(stack.layers, stack.params, grads, *settings, stack.copy)

    def where(self) -> tuple[Tensor, Buffers]:
        return self.stack.rows(), self.buffers


def advanced(
    params: Tensor,
    grads: Tensor,
    active: Tensor,
    inputs: Tensors,
    rule: ClientRule,
    local: LocalTraining,
    all_active: bool,
) -> Tensor:
    """Correct the gradients and move; clients that have done all their steps stay."""
    broadcast, client_state = part(inputs, "broadcast."), part(inputs, "client_state.")
    grads, start = grads.to(params.dtype), inputs["params"]
    if rule.is_linear:
        grads = rule.correct(grads, params, start, broadcast, client_state)
    else:  # a rule of the user's own may look at all of its client's gradient
        each = torch.func.vmap(rule.correct, in_dims=(0, 0, None, None, 0), randomness="different")
        grads = each(grads, params, start, broadcast, client_state)
    moved = local_step(params, grads, inputs["lr"], local)
    return moved if all_active else torch.where(active, moved, params)


def part(inputs: Tensors, prefix: str) -> dict[str, Tensor]:
    """The inputs whose names begin with `prefix`, without it."""
    return {n.removeprefix(prefix): v for n, v in inputs.items() if n.startswith(prefix)}


def _by_length(
    objective: BatchedObjective,
    params: Tensor,
    buffers: Buffers,
    batch: Batch,
    valid: Tensor,
    lengths: NDArray[np.int64],
) -> tuple[Tensor, Buffers]:
    """Gradients in groups of equal batches, for models and losses in which examples mix."""
    longest = int(lengths.max())
    if (lengths == longest).all():
        whole = {name: value[:, :longest] for name, value in batch.items()}
        return objective.gradients(params, buffers, whole, valid[:, :longest])
    grads, after = torch.zeros_like(params), Buffers(*(b.clone() for b in buffers))
    for length in np.unique(lengths[lengths > 0]):
        who = torch.from_numpy(np.flatnonzero(lengths == length)).to(params.device)
        some = {name: value[who, :length] for name, value in batch.items()}
        client_state = Buffers(*(b[who] for b in buffers))
        grads[who], new = objective.gradients(params[who], client_state, some, valid[who, :length])
        for target, value in zip(after, new, strict=True):
            target[who] = value
    return grads, after
