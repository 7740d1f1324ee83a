"""Local training: the settings of local SGD, and one step of it, shared by all algorithms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.aggregate import norms
from fedexp.errors import require


@dataclass(frozen=True)
class LocalTraining:
    """Settings of local SGD. The paper's are 20 steps of batches of 50, decay 0.998, clip 10.

    Args:
        lr: the client step size η_l > 0.
        steps: local steps τ; ignored when `epochs` is given.
        epochs: passes over the client's data instead of a number of steps.
        batch_size: examples per batch; None trains on all of the client's data at once.
        weight_decay: λ >= 0; λ w is added after clipping, as in torch
            (docs/paper.md#released-clipping).
        clip_norm: bound on the norm of the corrected gradient, over the whole vector.
        lr_decay: factor on lr after every round.
        decay_before_first_round: decay before the first round as well
            (docs/paper.md#released-decay-timing).
    """

    lr: float = 0.01
    steps: int = 20
    epochs: int | None = None
    batch_size: int | None = 50
    weight_decay: float = 0.0
    clip_norm: float | None = None
    lr_decay: float = 1.0
    decay_before_first_round: bool = False

    def __post_init__(self) -> None:
        require(math.isfinite(self.lr) and self.lr > 0, f"local.lr must be > 0, not {self.lr}")
        for name in ("steps", "epochs", "batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"local.{name} must be at least 1, not {value}")
        require(self.weight_decay >= 0, f"local.weight_decay must be >= 0: {self.weight_decay}")
        clip = self.clip_norm
        require(clip is None or clip > 0, f"local.clip_norm must be positive, not {clip}")
        require(0 < self.lr_decay <= 1, f"local.lr_decay must be in (0, 1], not {self.lr_decay}")

    def lr_at(self, round: int) -> float:
        """Return η_l in a round; rounds are counted from 1.

        >>> LocalTraining(lr=1.0, lr_decay=0.5).lr_at(2)
        0.5
        """
        return self.lr * self.lr_decay ** (round - 1 + self.decay_before_first_round)

    def steps_for(self, size: int) -> int:
        """Return the number of local steps of a client with `size` examples."""
        if self.epochs is None:
            return self.steps
        return self.epochs * math.ceil(size / (self.batch_size or size))


def local_step(
    params: Tensor, grad: Tensor, lr: float | Tensor, local: LocalTraining, in_place: bool = False
) -> Tensor:
    """Take one step of local SGD on parameters [..., d]: clip, add weight decay, descend.

    w - η (c g + λ w) with the clipping factor c, computed as (1 - η λ) w - (η c) g: fewer passes
    over the memory of a large model, and fewer still where `params` may be overwritten.
    """
    rate = torch.as_tensor(lr, dtype=torch.float64)
    if local.clip_norm is not None:
        rate = rate * clip_factor(grad, local.clip_norm)
    rate = rate.to(grad)
    if not local.weight_decay:
        out = params if in_place else None
        return torch.addcmul(params, grad, rate, value=-1, out=out)
    shrink = 1 - lr * local.weight_decay
    # in place, because another temporary of that size would take longer than the arithmetic
    shrunk = params.mul_(shrink) if in_place else params * shrink
    return shrunk.addcmul_(grad, rate, value=-1)


def clip_factor(grad: Tensor, bound: float) -> Tensor:
    """Return the clipping factors min(1, bound / norm) of vectors [..., d], shape [..., 1].

    >>> clip_factor(torch.tensor([3.0, 4.0]), 1.0).tolist()
    [0.2...]
    """
    rows = grad.reshape(-1, grad.shape[-1])
    if _surely_within(rows, bound):
        return torch.ones(*grad.shape[:-1], 1, dtype=torch.float64)
    # in float64, because the square of a large float32 overflows and the factor would be 0
    return clip_to(norms(rows).view(*grad.shape[:-1], 1), bound)


def _surely_within(rows: Tensor, bound: float) -> bool:
    """Return whether a cheap estimate shows that no norm reaches the bound; on a CPU only.

    It takes a tenth of the time of exact norms. The error of float32 sums is far below a factor of
    two, and a sum that overflows is not within the bound.
    """
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return False
    return bool((torch.linalg.vector_norm(rows, dim=1) < bound / 2).all())


def clip_to(norm: Tensor, bound: float) -> Tensor:
    """Return the factors that scale vectors of these norms to at most `bound`."""
    return (bound / norm).clamp(max=1.0)
