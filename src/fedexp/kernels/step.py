"""A step of local SGD of many clients, in place, on parameters that lie layer by layer.

It computes what `local.local_step` computes on a vector for each client. On a GPU that is two
Triton kernels: one for the norms of the gradients, and one that corrects, clips, decays and moves,
and writes the copy in which layers compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.kernels.launch import has_triton
from fedexp.kernels.layers import Layers


@dataclass(frozen=True, eq=False)
class Correction:
    """What a client rule adds to gradients: pull (w - start) + push.

    Attributes:
        pull: its strength; 0 for none.
        start: where the clients began, [d].
        push: a constant, layer by layer; None for none.
    """

    pull: float
    start: Tensor
    push: Tensor | None = None


def sq_norms(layers: Layers, params: Tensor, grads: Tensor, correction: Correction) -> Tensor:
    """The squared norms of the corrected gradients in float64, [K]."""
    if params.is_cuda and has_triton():
        from fedexp.kernels import step_triton

        return step_triton.sq_norms(layers, params, grads, correction)
    corrected = layers.gather(corrected_gradients(layers, params, grads, correction))
    return torch.linalg.vector_norm(corrected, dim=1, dtype=torch.float64).square()


def move(
    layers: Layers,
    params: Tensor,
    grads: Tensor,
    correction: Correction,
    rates: Tensor,
    keep: Tensor,
    active: Tensor,
    copy: Tensor | None = None,
) -> None:
    """Let w be keep * w - rate * (the corrected gradient), in place; those not active stay.

    Args:
        rates: [K], of every client.
        keep: what weight decay leaves of a parameter, a scalar.
        active: whether a client takes this step, [K].
        copy: the parameters in another type, kept alike.
    """
    if params.is_cuda and has_triton():
        from fedexp.kernels import step_triton

        step_triton.move(layers, params, grads, correction, rates, keep, active, copy)
        return
    corrected = layers.gather(corrected_gradients(layers, params, grads, correction))
    rows = layers.gather(params)
    moved = rows * keep.to(rows) - corrected * rates[:, None].to(rows)
    params.copy_(layers.spread(torch.where(active[:, None], moved, rows)))
    if copy is not None:
        copy.copy_(params)


def corrected_gradients(
    layers: Layers, params: Tensor, grads: Tensor, correction: Correction
) -> Tensor:
    """The gradients as the client rule wants them, layer by layer."""
    grads = grads.to(params.dtype)
    if correction.pull:
        grads = grads.add(params - layers.spread(correction.start), alpha=correction.pull)
    return grads if correction.push is None else grads + correction.push
