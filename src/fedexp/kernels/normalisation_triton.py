"""Triton kernels of GroupNorm fused with scale, shift, residual and ReLU.

Images are [N, C, H, W] in channels-last memory format; a client's scale and shift are a row of
[K, C]. A program computes one group of one image: it reads the values once, or, where they do not
fit the registers, twice, the second time from a cache. Programs of the same image are neighbours,
because they share lines of memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.launch import launch
from fedexp.kernels.layers import sum_parts

# From measurements on an H200: values of a group that are read at once; of larger groups, values
# per iteration, with a residual in half precision more; values per warp.
FORWARD_AT_ONCE, BACKWARD_AT_ONCE = 32768, 8192
CHUNK, RESIDUAL_CHUNK, VALUES_PER_WARP = 8192, 16384, 2048
STAGES = 3  # of the software pipeline


@triton.jit
def _raw(pointer, pixel, c, HW: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr):
    mask = (pixel < HW)[:, None] & (c < LAST)[None, :]
    return tl.load(pointer + pixel[:, None] * C + c[None, :], mask=mask, other=0.0)


@triton.jit
def _load(pointer, pixel, c, HW: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr):
    return _raw(pointer, pixel, c, HW, C, LAST).to(tl.float32)


@triton.jit
def _affine(weight, bias, client, w_row, b_row, channels, mask):
    """Return scale and shift of a client's channels in float32."""
    scale = tl.load(weight + client * w_row + channels, mask=mask, other=0.0)
    shift = tl.load(bias + client * b_row + channels, mask=mask, other=0.0)
    return scale.to(tl.float32), shift.to(tl.float32)


@triton.jit(do_not_specialize=["B"])
def _norm_forward(
    x, residual, weight, bias, y, mean_out, rstd_out, w_row, b_row, eps, B,
    C: tl.constexpr, HW: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    image, group = (tl.program_id(0) // G).to(tl.int64), tl.program_id(0) % G
    width: tl.constexpr = C // G
    c = tl.arange(0, COLUMNS)
    start = image * (HW * C) + group * width
    x += start
    y += start
    residual += start
    values = _load(x, tl.arange(0, ROWS), c, HW, C, width)
    count, mean, spread = 0.0, 0.0, 0.0
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        pixel = first + tl.arange(0, ROWS)
        if HW > ROWS:
            values = _load(x, pixel, c, HW, C, width)
        real = (pixel < HW)[:, None] & (c < width)[None, :]
        here = tl.minimum(ROWS, HW - first) * width * 1.0
        own = tl.sum(tl.sum(values, axis=1), axis=0) / here
        away = tl.where(real, values - own, 0.0)
        apart = own - mean
        spread += tl.sum(tl.sum(away * away, axis=1), axis=0)
        spread += apart * apart * count * here / (count + here)
        mean += apart * here / (count + here)
        count += here
    rstd = 1.0 / tl.sqrt_rn(spread / count + eps)
    tl.store(mean_out + image * G + group, mean)
    tl.store(rstd_out + image * G + group, rstd)
    channels = group * width + c
    scale, shift = _affine(weight, bias, image // B, w_row, b_row, channels, c < width)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        pixel = first + tl.arange(0, ROWS)
        if HW > ROWS:
            values = _load(x, pixel, c, HW, C, width)
        out = (values - mean) * rstd * scale[None, :] + shift[None, :]
        if RESIDUAL:
            out += _load(residual, pixel, c, HW, C, width)
        if RELU:
            out = tl.maximum(out, 0.0, propagate_nan=tl.PropagateNan.ALL)
        real = (pixel < HW)[:, None] & (c < width)[None, :]
        tl.store(y + pixel[:, None] * C + c[None, :], out.to(y.dtype.element_ty), mask=real)


@triton.jit
def _masked_gradient(dy, x, y, pixel, c, mean, rstd, scale, shift, HW: tl.constexpr,
                     C: tl.constexpr, LAST: tl.constexpr, RESIDUAL: tl.constexpr,
                     RELU: tl.constexpr):  # fmt: skip
    """Return values of x, and the gradient before the ReLU, whose mask comes from y or from x.

    Both stay in the type they were read in, which takes half the registers and loses nothing.
    """
    values, dz = _raw(x, pixel, c, HW, C, LAST), _raw(dy, pixel, c, HW, C, LAST)
    if RELU and RESIDUAL:
        dz = tl.where(_raw(y, pixel, c, HW, C, LAST) > 0, dz, 0.0)
    elif RELU:
        hat = (values.to(tl.float32) - mean) * rstd
        dz = tl.where(hat * scale[None, :] + shift[None, :] > 0, dz, 0.0)
    return values, dz.to(dy.dtype.element_ty)


@triton.jit(do_not_specialize=["B"])
def _norm_backward(
    dy, x, y, weight, bias, mean_in, rstd_in, dx, dresidual, dscales, w_row, b_row, B,
    C: tl.constexpr, HW: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    image, group = (tl.program_id(0) // G).to(tl.int64), tl.program_id(0) % G
    width: tl.constexpr = C // G
    c = tl.arange(0, COLUMNS)
    start = image * (HW * C) + group * width
    dy += start
    x += start
    y += start
    dx += start
    dresidual += start
    mean = tl.load(mean_in + image * G + group)
    rstd = tl.load(rstd_in + image * G + group)
    channels = group * width + c
    scale, shift = _affine(weight, bias, image // B, w_row, b_row, channels, c < width)
    by_scale = tl.zeros((COLUMNS,), dtype=tl.float32)
    by_shift = tl.zeros((COLUMNS,), dtype=tl.float32)
    pixel = tl.arange(0, ROWS)
    values, dz = _masked_gradient(
        dy, x, y, pixel, c, mean, rstd, scale, shift, HW, C, width, RESIDUAL, RELU
    )
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        if HW > ROWS:
            pixel = first + tl.arange(0, ROWS)
            values, dz = _masked_gradient(
                dy, x, y, pixel, c, mean, rstd, scale, shift, HW, C, width, RESIDUAL, RELU
            )
        by_scale += tl.sum(dz.to(tl.float32) * (values.to(tl.float32) - mean) * rstd, axis=0)
        by_shift += tl.sum(dz.to(tl.float32), axis=0)
    tl.store(dscales + image * C + channels, by_scale, mask=c < width)
    tl.store(dscales + (tl.num_programs(0) // G + image) * C + channels, by_shift, mask=c < width)
    along = tl.sum(by_scale * scale, axis=0) / (HW * width)
    level = tl.sum(by_shift * scale, axis=0) / (HW * width)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        if HW > ROWS:
            pixel = first + tl.arange(0, ROWS)
            values, dz = _masked_gradient(
                dy, x, y, pixel, c, mean, rstd, scale, shift, HW, C, width, RESIDUAL, RELU
            )
        hat = (values.to(tl.float32) - mean) * rstd
        out = rstd * (dz.to(tl.float32) * scale[None, :] - level - hat * along)
        at = pixel[:, None] * C + c[None, :]
        real = (pixel < HW)[:, None] & (c < width)[None, :]
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=real)
        if RESIDUAL and RELU:
            tl.store(dresidual + at, dz, mask=real)


class GroupNorm(torch.autograd.Function):
    """GroupNorm of images by groups, with scale and shift, a residual and ReLU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, groups: int,
        eps: float, relu: bool,
    ) -> Tensor:  # fmt: skip
        """Return the result; mean and 1/deviation of each image's groups are saved."""
        x, has_residual = _channels_last(x), residual is not None
        y = torch.empty_like(x)
        mean, rstd = (torch.empty(len(x), groups, device=x.device) for _ in range(2))
        launch(
            _norm_forward, (len(x) * groups,),
            x, x if residual is None else _channels_last(residual), weight, bias, y, mean, rstd,
            weight.stride(0), bias.stride(0), eps,
            **_sizes(x, weight, groups, FORWARD_AT_ONCE, CHUNK), RESIDUAL=has_residual, RELU=relu,
        )  # fmt: skip
        # backward needs the sign of y under ReLU; without a residual it is as cheap to recompute
        ctx.save_for_backward(x, y if relu and has_residual else None, weight, bias, mean, rstd)
        ctx.groups, ctx.relu, ctx.has_residual = groups, relu, has_residual
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; those of scale and shift may be in their buffers (`sum_parts`)."""
        x, y, weight, bias, mean, rstd = ctx.saved_tensors
        dy, dx, masked = _channels_last(dy), torch.empty_like(x), y is not None
        dresidual = torch.empty_like(x) if masked else dy
        chunk = RESIDUAL_CHUNK if masked and x.element_size() == 2 else CHUNK
        dscales = torch.empty(2, len(x), x.shape[1], device=x.device)
        launch(
            _norm_backward, (len(x) * ctx.groups,),
            dy, x, y if masked else x, weight, bias, mean, rstd,
            dx, dresidual if masked else dx, dscales, weight.stride(0), bias.stride(0),
            **_sizes(x, weight, ctx.groups, BACKWARD_AT_ONCE, chunk),
            RESIDUAL=masked, RELU=ctx.relu,
        )  # fmt: skip
        grads = sum_parts(dscales.unflatten(1, (len(weight), -1)), weight, bias)
        return dx, *grads, dresidual if ctx.has_residual else None, None, None, None


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _sizes(x: Tensor, weight: Tensor, groups: int, at_once: int, chunk: int) -> dict[str, Any]:
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    columns = triton.next_power_of_2(channels // groups)
    rows_of_all = triton.next_power_of_2(pixels)
    rows = min(rows_of_all, max(1, at_once // columns))
    if rows < pixels:
        rows = min(rows_of_all, max(1, chunk // columns))
    values = rows * columns
    return {
        "B": len(x) // len(weight), "C": channels, "HW": pixels, "G": groups,
        "ROWS": rows, "COLUMNS": columns, "STAGES": STAGES,
        "num_warps": min(32, max(2, values // VALUES_PER_WARP)),
    }  # fmt: skip
