"""Copies of tensors in the order, or in the halves, that tensor cores want."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.launch import launch

LENGTH, TILE = 4096, 64


@triton.jit
def halves_kernel(x, high, low, size, LENGTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * LENGTH + tl.arange(0, LENGTH)
    value = tl.load(x + i, mask=i < size)
    upper = value.to(tl.bfloat16)
    tl.store(high + i, upper, mask=i < size)
    tl.store(low + i, (value - upper.to(tl.float32)).to(tl.bfloat16), mask=i < size)


@triton.jit
def turn_kernel(
    w, turned, w_row, OC: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr
):
    """turned[c, TAPS - 1 - tap, o] = w[o, tap, c], of each client."""
    client, tap = tl.program_id(2).to(tl.int64), tl.program_id(1)
    across: tl.constexpr = (C + TILE - 1) // TILE
    o = (tl.program_id(0) // across) * TILE + tl.arange(0, TILE)
    c = (tl.program_id(0) % across) * TILE + tl.arange(0, TILE)
    real = (o < OC)[:, None] & (c < C)[None, :]
    block = tl.load(w + client * w_row + (o[:, None] * TAPS + tap) * C + c[None, :], mask=real)
    at = (c[:, None] * TAPS + TAPS - 1 - tap) * OC + o[None, :]
    tl.store(turned + client * (C * TAPS * OC) + at, tl.trans(block), mask=tl.trans(real))


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


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 as the sum of two in bf16, each with 8 of its upper 16 bits."""
    high, low = (torch.empty_like(x, dtype=torch.bfloat16) for _ in range(2))
    grid = (triton.cdiv(x.numel(), LENGTH),)
    launch(halves_kernel, grid, x, high, low, x.numel(), LENGTH=LENGTH, num_warps=8)
    return high, low


def turned_weights(w: Tensor) -> Tensor:
    """Weights [K, O, C, KH, KW] as [K, C, O, KH, KW], with their taps the other way round."""
    clients, outputs, channels, *window = w.shape
    turned = torch.empty((clients, channels, *window, outputs), dtype=w.dtype, device=w.device)
    tiles = triton.cdiv(outputs, TILE) * triton.cdiv(channels, TILE)
    taps = window[0] * window[1]
    sizes = {"OC": outputs, "C": channels, "TAPS": taps, "TILE": TILE}
    launch(turn_kernel, (tiles, taps, clients), w, turned, w.stride(0), **sizes)
    return turned.movedim(-1, 2)
