"""Triton kernels of the local SGD step and of sums of partial gradients.

`layers` dispatches to them and has their plain twins.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.launch import launch
from fedexp.kernels.layers import Correction, Layers

LENGTH = 4096  # numbers per program
# No kernel has an argument called `params`: Triton reserves that name.


@triton.jit
def _corrected(
    weights, grads, start, offset, at, begin, length,
    PROX: tl.constexpr, OFFSET: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Return parameters and corrected gradients of a block; the padding of rows stays zero."""
    i = tl.arange(0, LENGTH)
    real = i < (length + 15) // 16 * 16  # so that the compiler reads 16 at a time
    p = tl.load(weights + at + i, mask=real, other=0.0)
    g = tl.load(grads + at + i, mask=real, other=0.0).to(p.dtype)
    if PROX != 0.0:
        g += (p - tl.load(start + begin + i, mask=i < length, other=0.0)) * PROX
    if OFFSET:
        g += tl.load(offset + at + i, mask=real, other=0.0)
    return p, g


@triton.jit
def sq_norms_kernel(
    weights, grads, start, offset, table, sums,
    PROX: tl.constexpr, OFFSET: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = tl.multiple_of(tl.load(table + 4 * block), 16)
    length, begin = tl.load(table + 4 * block + 1), tl.load(table + 4 * block + 2)
    # without PROX the compiler drops the load of the parameters
    _, g = _corrected(weights, grads, start, offset, at, begin, length, PROX, OFFSET, LENGTH)
    wide = g.to(tl.float64)
    tl.store(sums + block, tl.sum(wide * wide))


@triton.jit(do_not_specialize=["blocks"])
def clip_kernel(sums, lr, lrs, blocks, BOUND: tl.constexpr, LENGTH: tl.constexpr):
    client = tl.program_id(0)
    i = tl.arange(0, LENGTH)
    total = tl.zeros((LENGTH,), dtype=tl.float64)
    for first in range(0, blocks, LENGTH):
        here = first + i
        total += tl.load(sums + client * blocks + here, mask=here < blocks, other=0.0)
    factor = BOUND / tl.sqrt(tl.sum(total))  # NaN for a gradient that is not finite
    factor = tl.where(factor > 1.0, 1.0, factor)
    tl.store(lrs + client, (tl.load(lr) * factor).to(lrs.dtype.element_ty))


@triton.jit
def sgd_step_kernel(
    weights, grads, start, offset, table, lrs, decay, active, copy, deltas, deltas_row,
    PROX: tl.constexpr, OFFSET: tl.constexpr, COPY: tl.constexpr, DELTAS: tl.constexpr,
    LENGTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    client = tl.load(table + 4 * block + 3)
    is_active = tl.load(active + client)
    if is_active or DELTAS:
        at = tl.multiple_of(tl.load(table + 4 * block), 16)
        length, begin = tl.load(table + 4 * block + 1), tl.load(table + 4 * block + 2)
        p, g = _corrected(weights, grads, start, offset, at, begin, length, PROX, OFFSET, LENGTH)
        after = p * tl.load(decay) - g * tl.load(lrs + client)
        i = tl.arange(0, LENGTH)
        if DELTAS:
            after = tl.where(is_active, after, p)
            first = tl.load(start + begin + i, mask=i < length, other=0.0)
            tl.store(deltas + client * deltas_row + begin + i, first - after, mask=i < length)
        else:
            real = i < (length + 15) // 16 * 16
            tl.store(weights + at + i, after, mask=real)
            if COPY:
                tl.store(copy + at + i, after.to(copy.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["parts"])
def sum_parts_kernel(
    x, one, two, x_weight, x_client, x_part, one_client, two_client, parts,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    client, number = tl.program_id(0).to(tl.int64), tl.program_id(2)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x += client * x_client + number * x_weight
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, parts, ROWS):
        row = first + tl.arange(0, ROWS)
        real = (row < parts)[:, None] & (c < SIZE)[None, :]
        at = row.to(tl.int64)[:, None] * x_part + c[None, :]
        total += tl.sum(tl.load(x + at, mask=real, other=0.0), axis=0)
    if number == 0:
        tl.store(one + client * one_client + c, total.to(one.dtype.element_ty), mask=c < SIZE)
    elif TWO:
        tl.store(two + client * two_client + c, total.to(two.dtype.element_ty), mask=c < SIZE)


def sum_parts(parts: Tensor, results: list[Tensor]) -> None:
    """Write the sums over dimension 2 of [n, K, parts, size]; n is 1 or 2."""
    number, clients, count, size = parts.shape
    one, two = results[0], results[-1]
    columns = min(128, triton.next_power_of_2(size))
    launch(
        sum_parts_kernel, (clients, triton.cdiv(size, columns), number),
        parts, one, two, parts.stride(0), parts.stride(1), parts.stride(2),
        one.stride(0), two.stride(0), count,
        SIZE=size, ROWS=min(32, triton.next_power_of_2(count)), COLUMNS=columns, TWO=number == 2,
        num_warps=4,
    )  # fmt: skip


def clipped_lrs(
    layers: Layers,
    params: Tensor,
    grads: Tensor,
    correction: Correction,
    lr: Tensor,
    bound: float,
) -> Tensor:
    """Return what `layers.clipped_lrs` does."""
    table = _table(layers, params.device)
    sums = torch.empty(len(table), dtype=torch.float64, device=params.device)
    operands, known = _settings(params, grads, correction)
    launch(sq_norms_kernel, (len(table),), *operands, table, sums, **known)
    lrs = torch.empty(layers.clients, dtype=params.dtype, device=params.device)
    blocks = len(table) // layers.clients
    launch(clip_kernel, (layers.clients,), sums, lr, lrs, blocks, BOUND=bound, LENGTH=1024)
    return lrs


def sgd_step(
    layers: Layers,
    params: Tensor,
    grads: Tensor,
    correction: Correction,
    lrs: Tensor,
    decay: Tensor,
    active: Tensor,
    copy: Tensor | None,
    deltas: Tensor | None,
) -> None:
    """Take the step of `layers.sgd_step`."""
    table = _table(layers, params.device)
    operands, known = _settings(params, grads, correction)
    launch(
        sgd_step_kernel,
        (len(table),),
        *operands,
        table,
        lrs.to(params.dtype).contiguous(),
        decay.to(params.dtype),
        active,
        params if copy is None else copy,
        params if deltas is None else deltas,
        0 if deltas is None else deltas.stride(0),
        COPY=copy is not None,
        DELTAS=deltas is not None,
        **known,
    )


def _settings(
    params: Tensor, grads: Tensor, correction: Correction
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    prox, offset = float(correction.prox), correction.offset
    operands = (params, grads, correction.start, params if offset is None else offset)
    # prox is a compile-time constant: as an argument it would be a float32
    return operands, {"PROX": prox, "OFFSET": offset is not None, "LENGTH": LENGTH, "num_warps": 8}


@cache
def _table(layers: Layers, device: torch.device) -> Tensor:
    """Return the table of blocks, cached: a captured graph must not copy it from the host."""
    return layers.blocks(LENGTH).pin_memory().to(device, non_blocking=True)
