"""Triton kernels over one vector per client: squared norms, and the weighted sum over clients.

`fedexp.aggregate` dispatches to them and has their plain twins, which read every vector several
times: to widen it, to replace values that are not finite, and to sum. These read it twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.launch import launch

LENGTH = 4096  # numbers per program that sums squares
COLUMNS = 1024  # per program that sums over clients


@triton.jit
def squares_kernel(x, sums, x_row, size, LENGTH: tl.constexpr):
    client, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = block * LENGTH + tl.arange(0, LENGTH)
    wide = tl.load(x + client * x_row + i, mask=i < size, other=0.0).to(tl.float64)
    tl.store(sums + client * tl.num_programs(1) + block, tl.sum(wide * wide))


@triton.jit(do_not_specialize=["clients"])
def weighted_sum_kernel(x, weights, total, x_row, clients, size, COLUMNS: tl.constexpr):
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    result = tl.zeros((COLUMNS,), dtype=tl.float64)
    for k in range(clients):
        weight = tl.load(weights + k)
        values = tl.load(x + i, mask=i < size, other=0.0).to(tl.float64)
        result += tl.where(weight != 0.0, weight * values, 0.0)  # zero times NaN is NaN
        x += x_row
    tl.store(total + i, result.to(total.dtype.element_ty), mask=i < size)


def sq_norms(rows: Tensor) -> Tensor:
    """Return the squared norms of the rows of [K, d] in float64, [K]."""
    clients, size = rows.shape
    blocks = triton.cdiv(size, LENGTH)
    sums = torch.empty(clients, blocks, dtype=torch.float64, device=rows.device)
    launch(squares_kernel, (clients, blocks), rows, sums, rows.stride(0), size, LENGTH=LENGTH)
    return sums.sum(dim=1)


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Return the sum over the clients of weights [K], float64, times rows [K, d]."""
    total = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
    grid = (triton.cdiv(rows.shape[1], COLUMNS),)
    launch(
        weighted_sum_kernel, grid, rows, weights.contiguous(), total,
        rows.stride(0), *rows.shape, COLUMNS=COLUMNS,
    )  # fmt: skip
    return total
