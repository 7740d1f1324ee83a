"""`flatten_images`: images whose channels lie last as vectors whose channels come first.

That turns every image round in memory. Compilers merge it with what comes before (dropout, pooling)
and then read all of that across its order; as an operator of its own it is a copy by tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedexp.kernels.launch import has_triton


def flatten_images(x: Tensor) -> Tensor:
    """[N, C, H, W] as [N, C * H * W].

    >>> flatten_images(torch.arange(8.0).view(1, 2, 2, 2)).tolist()
    [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    """
    y: Tensor = _turned(x.permute(0, 2, 3, 1).flatten(1, 2))
    return y.flatten(1)


@torch.library.custom_op("fedexp::turned", mutates_args=())
def _turned(x: Tensor) -> Tensor:
    """[N, A, B] as [N, B, A], in memory."""
    if not (x.is_cuda and has_triton()):
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    from fedexp.kernels.reorder import turned_matrices

    return turned_matrices(x.contiguous())


@_turned.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1])


def _remember(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    """Turning back needs nothing."""


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    back: Tensor = _turned(dy)
    return back


_turned.register_autograd(_backward, setup_context=_remember)
