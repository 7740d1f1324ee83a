"""Triton kernels of the cross-entropy of rows of logits, and of its gradient.

`loss` dispatches to them and has their plain twin, which is eight launches on small tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.launch import launch

NUMBERS = 2048  # per program


@triton.jit
def _logits(x, targets, n, c, rows, CLASSES: tl.constexpr, IGNORED: tl.constexpr):
    """Return logits in float32, -inf beyond the classes, with targets and what to do with them."""
    real = (n < rows)[:, None] & (c < CLASSES)[None, :]
    values = tl.load(x + n[:, None] * CLASSES + c[None, :], mask=real, other=0.0).to(tl.float32)
    values = tl.where((c < CLASSES)[None, :], values, float("-inf"))
    target = tl.load(targets + n, mask=n < rows, other=0)
    is_class = (target >= 0) & (target < CLASSES)
    return values, target, target == IGNORED, is_class


@triton.jit
def cross_entropy_kernel(
    x, targets, losses, totals, rows,
    CLASSES: tl.constexpr, IGNORED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    values, target, ignored, is_class = _logits(x, targets, n, c, rows, CLASSES, IGNORED)
    largest = tl.max(values, axis=1)
    total = largest + tl.log(tl.sum(tl.exp(values - largest[:, None]), axis=1))
    own = tl.sum(tl.where(c[None, :] == target[:, None], values, 0.0), axis=1)
    loss = tl.where(is_class, total - own, float("nan"))
    tl.store(losses + n, tl.where(ignored, 0.0, loss), mask=n < rows)
    tl.store(totals + n, total, mask=n < rows)


@triton.jit
def cross_entropy_gradient_kernel(
    dlosses, x, targets, totals, dx, rows,
    CLASSES: tl.constexpr, IGNORED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    values, target, ignored, is_class = _logits(x, targets, n, c, rows, CLASSES, IGNORED)
    total = tl.load(totals + n, mask=n < rows, other=0.0)
    gradient = tl.exp(values - total[:, None])
    gradient = tl.where(c[None, :] == target[:, None], gradient - 1.0, gradient)
    gradient *= tl.load(dlosses + n, mask=n < rows, other=0.0)[:, None]
    gradient = tl.where(is_class[:, None], gradient, float("nan"))
    gradient = tl.where(ignored[:, None], 0.0, gradient)
    real = (n < rows)[:, None] & (c < CLASSES)[None, :]
    at = dx + n[:, None] * CLASSES + c[None, :]
    tl.store(at, gradient.to(dx.dtype.element_ty), mask=real)


class CrossEntropy(torch.autograd.Function):
    """The losses [n] of logits [n, classes]; the logarithms of sums of exponentials are saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        rows = len(logits)
        losses, totals = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
        grid, settings = _settings(logits, ignored)
        launch(cross_entropy_kernel, grid, logits, targets, losses, totals, rows, **settings)
        ctx.save_for_backward(logits, targets, totals)
        ctx.ignored = ignored
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, totals = ctx.saved_tensors
        dx = torch.empty_like(logits)
        grid, settings = _settings(logits, ctx.ignored)
        operands = (dlosses.contiguous(), logits, targets, totals, dx, len(logits))
        launch(cross_entropy_gradient_kernel, grid, *operands, **settings)
        return dx, None, None


def _settings(logits: Tensor, ignored: int) -> tuple[tuple[int], dict[str, int]]:
    rows, classes = logits.shape
    columns = triton.next_power_of_2(classes)
    each = max(1, NUMBERS // columns)
    settings = {"CLASSES": classes, "IGNORED": ignored, "ROWS": each, "COLUMNS": columns}
    return (triton.cdiv(rows, each),), settings
