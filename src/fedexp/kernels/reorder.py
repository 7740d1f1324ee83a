"""Copies of tensors in another order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.launch import launch

TILE = 64


@triton.jit
def transpose_kernel(x, y, A: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr):
    """y[n, b, a] = x[n, a, b]."""
    across: tl.constexpr = (B + TILE - 1) // TILE
    start = tl.program_id(1).to(tl.int64) * (A * B)
    a = (tl.program_id(0) // across) * TILE + tl.arange(0, TILE)
    b = (tl.program_id(0) % across) * TILE + tl.arange(0, TILE)
    real = (a < A)[:, None] & (b < B)[None, :]
    block = tl.load(x + start + a[:, None] * B + b[None, :], mask=real)
    tl.store(y + start + b[:, None] * A + a[None, :], tl.trans(block), mask=tl.trans(real))


def turned_matrices(x: Tensor) -> Tensor:
    """Matrices [N, A, B] as [N, B, A]."""
    n, a, b = x.shape
    y = torch.empty((n, b, a), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(a, TILE) * triton.cdiv(b, TILE)
    launch(transpose_kernel, (tiles, n), x, y, A=a, B=b, TILE=TILE)
    return y
