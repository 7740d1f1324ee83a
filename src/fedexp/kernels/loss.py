"""`cross_entropy` of the examples of all clients, one kernel forward and one backward on a GPU.

A small model's step is mostly launches, of which log-softmax, the choice of the target, their
gradients and the conversions between them are eight. The kernels are in `loss_triton`; elsewhere
it is torch's own loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.kernels.launch import differentiable, has_triton

MOST_CLASSES = 2048  # of a row of logits that one program holds


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int, dtype: torch.dtype) -> Tensor:
    """Return the cross-entropy of each row of logits [n, classes] in `dtype`, [n].

    A target that is not a class gives NaN on a GPU, and with it an update that does not count,
    where torch ends the process; on a CPU it is an error.

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
        from fedexp.kernels.loss_triton import CrossEntropy

        return differentiable(CrossEntropy, logits.contiguous(), targets.contiguous(), ignored)
    logits = logits.to(dtype)
    return F.cross_entropy(logits, targets, ignore_index=ignored, reduction="none")
