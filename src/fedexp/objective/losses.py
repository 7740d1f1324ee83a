"""Losses: those of torch's own that average over targets in their own way, the shapes that a loss
compares, and copies of losses with state.

The mean of a cross entropy with ignored targets or class weights is not the mean over examples. It
is one number for a batch in training; in an evaluation each example has the sum over its targets
and counts as much as they do, so that all examples have the loss that torch returns for them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.errors import require
from fedexp.precision import widest

Loss = Callable[[Any, Any], Tensor]  # of (outputs, targets)


class ClassLoss(NamedTuple):
    """A cross entropy or negative log-likelihood, torch's own, of targets that are class numbers.

    Attributes:
        ignore_index: target that does not count.
        weight: what the targets of each class count, [classes]; None where all count as one.
    """

    ignore_index: int
    weight: Tensor | None

    def parts(self, targets: Tensor) -> Tensor:
        """Return the mean of what the targets of each example count, [n].

        >>> ClassLoss(9, torch.tensor([1.0, 3.0])).parts(torch.tensor([[0, 1], [1, 9]])).tolist()
        [2.0, 1.5]
        """
        parts = (targets != self.ignore_index).to(widest(targets.device))
        if self.weight is not None:
            classes = targets.clamp(0, len(self.weight) - 1)  # ignored ones may be no classes
            parts = parts * self.weight.to(parts)[classes]
        return parts.reshape(len(parts), -1).mean(dim=1)


def class_loss(loss: Any) -> ClassLoss | None:
    """Return the settings of torch's cross entropy or negative log-likelihood; None for others.

    >>> class_loss(F.cross_entropy), class_loss(nn.MSELoss())
    (ClassLoss(ignore_index=-100, weight=None), None)
    """
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return ClassLoss(loss.ignore_index, loss.weight)
    settings = loss.keywords if isinstance(loss, partial) else {}
    if (loss.func if isinstance(loss, partial) else loss) not in (F.cross_entropy, F.nll_loss):
        return None
    return ClassLoss(settings.get("ignore_index", -100), settings.get("weight"))


def reduced(loss: Any, reduction: str) -> Loss:
    """Return a loss that has a `reduction` with another one."""
    if loss is F.cross_entropy:
        return nn.CrossEntropyLoss(reduction=reduction)
    if not isinstance(loss, nn.Module):
        return partial(loss, reduction=reduction)
    other: Any = deepcopy(loss)
    other.reduction = reduction
    return cast(Loss, other)


def check_shapes(outputs: Any, targets: Any, losses: Tensor) -> None:
    """Refuse losses of outputs and labels whose shapes were broadcast."""
    if losses.ndim < 2 or not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return
    alike = outputs.ndim != targets.ndim or outputs.shape == targets.shape
    require(
        alike and losses.shape == targets.shape[: losses.ndim],
        f"the loss of outputs {list(outputs.shape)} and labels {list(targets.shape)} has the shape "
        f"{list(losses.shape)}; give outputs and labels one shape{in_one_shape(outputs, targets)}",
    )


def in_one_shape(outputs: Any, targets: Any) -> str:
    """Return an example of how one of them gets the shape of the other; empty without any."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return ""
    if outputs.shape == (*targets.shape, 1):
        return f", e.g. output.squeeze({targets.ndim})"
    if targets.shape == (*outputs.shape, 1):
        return f", e.g. y[{':, ' * outputs.ndim}0]"
    return ""


def copied_loss(loss: Any) -> Any:
    """Return a copy of a loss, which may have state; the loss itself where it cannot be copied."""
    try:
        return deepcopy(loss)
    except Exception:  # it may hold a handle or anything else that cannot be copied
        return loss


def loss_on(loss: Any, target: torch.device | torch.dtype) -> Any:
    """Return a loss with its tensors, e.g. weights of classes, moved or converted in place."""
    if isinstance(loss, nn.Module):
        return loss.to(target)
    if not isinstance(loss, partial):
        return loss
    settings = {
        name: value.to(target)
        if isinstance(value, Tensor)
        and (value.is_floating_point() or isinstance(target, torch.device))
        else value
        for name, value in loss.keywords.items()
    }
    return partial(loss.func, *loss.args, **settings)
