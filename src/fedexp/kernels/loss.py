"""`cross_entropy` of the examples of all clients, one kernel forward and one backward on a GPU.

A small model's step is mostly launches, of which log-softmax, the choice of the target, their
gradients and the conversions between them are eight. The kernels are in `loss_triton`; elsewhere
it is torch's own loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.kernels.launch import differentiable, has_triton

MOST_CLASSES = 2048  # of a row of logits that one program holds


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int, dtype: torch.dtype) -> Tensor:
    """Return the cross-entropy of each row of logits [n, classes] in `dtype`, [n].

    A target that is no class gives NaN on a GPU, and with it an update that does not count, where
    torch ends the process; on a CPU it is an error.

    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([1]), -100, torch.float32).item()
    0.6931471824645996
    """
    if (
        logits.is_cuda
        and dtype == torch.float32
        and logits.ndim == 2
        and logits.shape[1] <= MOST_CLASSES
        and logits.dtype != torch.float64
        and targets.shape == logits.shape[:1]
        and not targets.is_floating_point()
        and has_triton()
    ):
        return differentiable(_CrossEntropy, logits.contiguous(), targets.contiguous(), ignored)
    logits = logits.to(dtype)
    return F.cross_entropy(logits, targets, ignore_index=ignored, reduction="none")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        from fedexp.kernels import loss_triton

        losses, totals = loss_triton.forward(logits, targets, ignored)
        ctx.save_for_backward(logits, targets, totals)
        ctx.ignored = ignored
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor, None, None]:
        from fedexp.kernels import loss_triton

        logits, targets, totals = ctx.saved_tensors
        dlosses, ignored = dlosses.contiguous(), ctx.ignored
        return loss_triton.backward(dlosses, logits, targets, totals, ignored), None, None
