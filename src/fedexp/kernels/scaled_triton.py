"""The Triton twin of `scaled`: one pass for the largest number of each client, one to convert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.launch import launch
from fedexp.kernels.scaled import LARGEST_EXPONENT, TARGET

LOOK_AT, CONVERT = 16384, 4096  # numbers a program


@triton.jit
def largest_kernel(x, bits, row, size, LENGTH: tl.constexpr):
    """The bits of the largest absolute value: they are in the order of the values, NaN last."""
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * LENGTH + tl.arange(0, LENGTH)
    values = tl.load(x + client * row + i, mask=i < size, other=0.0)
    seen = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(bits + client, tl.max(seen, axis=0), sem="relaxed")


@triton.jit
def convert_kernel(x, bits, half, unit, row, size, TARGET: tl.constexpr, MOST: tl.constexpr,
                   LENGTH: tl.constexpr):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    own = tl.load(bits + client) >> 23
    exponent = tl.minimum(TARGET - own, MOST)
    exponent = tl.where(own == 255, 127, exponent)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    i = tl.program_id(0) * LENGTH + tl.arange(0, LENGTH)
    values = tl.load(x + client * row + i, mask=i < size, other=0.0)
    tl.store(half + client * size + i, (values * scale).to(tl.float16), mask=i < size)
    if tl.program_id(0) == 0:
        tl.store(unit + client, ((254 - exponent) << 23).to(tl.float32, bitcast=True))


def scaled_half(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [K, n] in half precision, and what each client's are to be multiplied by, [K]."""
    clients, size = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    bits = torch.zeros(clients, dtype=torch.int32, device=rows.device)
    half = torch.empty((clients, size), dtype=torch.float16, device=rows.device)
    unit = torch.empty(clients, dtype=torch.float32, device=rows.device)
    grid = (triton.cdiv(size, LOOK_AT), clients)
    launch(largest_kernel, grid, rows, bits, rows.stride(0), size, LENGTH=LOOK_AT, num_warps=8)
    launch(
        convert_kernel, (triton.cdiv(size, CONVERT), clients),
        rows, bits, half, unit, rows.stride(0), size,
        TARGET=TARGET, MOST=LARGEST_EXPONENT, LENGTH=CONVERT, num_warps=8,
    )  # fmt: skip
    return half, unit
