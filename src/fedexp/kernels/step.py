"""The step of local SGD for many clients, in place, on parameters stored layer by layer.

It computes what `local.local_step` computes on one vector per client. On a GPU that is two Triton
kernels (`step_triton`): one for the norms of the gradients, and one that corrects, clips, decays
and updates, and writes the copy of the parameters that the layers compute with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.kernels.launch import has_triton
from fedexp.kernels.layers import Layers


@dataclass(frozen=True, eq=False)
class Correction:
    """The linear correction of a client rule: prox (w - start) + offset is added to gradients.

    Attributes:
        prox: factor of the proximal term; 0 for none.
        start: the parameters before local training, [d].
        offset: a constant, layer by layer; None for none.
    """

    prox: float
    start: Tensor
    offset: Tensor | None = None


def sq_norms(layers: Layers, params: Tensor, grads: Tensor, correction: Correction) -> Tensor:
    """Return the squared norms of the corrected gradients in float64, [K]."""
    if params.is_cuda and has_triton():
        from fedexp.kernels import step_triton

        return step_triton.sq_norms(layers, params, grads, correction)
    corrected = layers.unpack(_corrected(layers, params, grads, correction))
    return torch.linalg.vector_norm(corrected, dim=1, dtype=torch.float64).square()


def sgd_step(
    layers: Layers,
    params: Tensor,
    grads: Tensor,
    correction: Correction,
    lrs: Tensor,
    decay: Tensor,
    active: Tensor,
    copy: Tensor | None = None,
) -> None:
    """Update w to decay * w - lr * (corrected gradient) in place, for the active clients.

    Args:
        lrs: the learning rate of every client times its clipping factor, [K].
        decay: 1 minus learning rate times weight decay, a scalar.
        active: whether a client takes this step, [K].
        copy: the parameters in another type, updated as well.
    """
    if params.is_cuda and has_triton():
        from fedexp.kernels import step_triton

        step_triton.sgd_step(layers, params, grads, correction, lrs, decay, active, copy)
        return
    corrected = layers.unpack(_corrected(layers, params, grads, correction))
    rows = layers.unpack(params)
    updated = rows * decay.to(rows) - corrected * lrs[:, None].to(rows)
    params.copy_(layers.pack(torch.where(active[:, None], updated, rows)))
    if copy is not None:
        copy.copy_(params)


def _corrected(layers: Layers, params: Tensor, grads: Tensor, correction: Correction) -> Tensor:
    """Return the gradients with the client rule's correction, layer by layer."""
    grads = grads.to(params.dtype)
    if correction.prox:
        grads = grads.add(params - layers.pack(correction.start), alpha=correction.prox)
    return grads if correction.offset is None else grads + correction.offset
