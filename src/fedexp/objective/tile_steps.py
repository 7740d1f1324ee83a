"""The way forth and the way back of a block of tiles, without python in between.

Threads that hand python's lock to each other after each of forty operations lose what the
arithmetic gains. TorchScript runs a function without that lock; where a torch has it no longer, the
same functions run as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedexp.objective.tile_rooms import Kept, Scratch


@cache
def scripted(function: Callable[..., None]) -> Callable[..., None]:
    """The function as TorchScript, or as it is."""
    script: Any = getattr(torch.jit, "script", None)
    if script is None:
        return function
    with warnings.catch_warnings():  # that it will go one day
        warnings.simplefilter("ignore")
        try:
            quick: Callable[..., None] = script(function)
        except (RuntimeError, OSError):  # the last where there is no source to read
            return function
    return quick


def forth(
    views: tuple[Tensor, Tensor],
    kept: Kept,
    scratch: Scratch,
    matrices: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Patches of images become maxima."""
    patches, maxima = views
    first, second, bias = weights
    convolve(patches, kept, scratch, matrices, first, second)
    choose(kept, scratch, bias)
    maxima.copy_(scratch.places)


def convolve(
    patches: Tensor,
    kept: Kept,
    scratch: Scratch,
    matrices: tuple[Tensor, Tensor],
    first: Tensor,
    second: Tensor,
) -> None:
    """Both convolutions; outputs lie where the choice among them will."""
    inputs, outputs = matrices
    kept.places.copy_(patches)
    torch.mm(kept.patches_turned, first, out=kept.hidden_rows)
    kept.hidden.clamp_min_(0)
    torch.mm(inputs, kept.hidden, out=kept.spectrum_lines)
    torch.bmm(kept.spectra, second, out=scratch.products)
    torch.mm(outputs, scratch.product_lines, out=kept.chosen_lines)


def choose(kept: Kept, scratch: Scratch, bias: Tensor) -> None:
    """Maxima, and in place of the outputs 1 where an error goes back to them, else 0."""
    pooled, taken = scratch.pooled, scratch.taken
    pooled.copy_(kept.quarters[0])
    for quarter in kept.quarters[1:]:
        torch.maximum(pooled, quarter, out=pooled)
    torch.eq(kept.chosen, scratch.spread, out=kept.chosen)
    scratch.places.add_(bias)  # the largest stays the largest
    torch.le(pooled, 0, out=taken)  # what the ReLU stops goes back to nobody
    for quarter in kept.quarters:  # of equals to the first, as in torch
        torch.gt(quarter, taken, out=quarter)
        taken.add_(quarter)
    pooled.clamp_min_(0)


def back(
    errors: Tensor,
    kept: Kept,
    scratch: Scratch,
    matrices: tuple[Tensor, Tensor],
    second: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Errors of the maxima become those of products and hidden values, and are added to sums."""
    inputs, outputs = matrices
    first_sum, second_sum, bias_sum = sums
    scratch.places.copy_(errors)
    torch.mul(kept.chosen, scratch.spread, out=scratch.outputs)
    torch.mm(outputs.t(), scratch.output_lines, out=scratch.product_lines)
    bias_sum.add_(scratch.sums.sum(dim=0))
    second_sum.baddbmm_(scratch.products_turned, kept.spectra)
    torch.bmm(scratch.products, second, out=scratch.spectra)
    torch.mm(inputs.t(), scratch.spectrum_lines, out=scratch.hidden)
    torch.ops.aten.threshold_backward(scratch.hidden, kept.hidden, 0, grad_input=scratch.hidden)
    first_sum.addmm_(kept.patches, scratch.hidden_rows)
