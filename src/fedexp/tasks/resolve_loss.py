"""`resolve_loss`: how a loss is used, per example or as the mean over a batch.

A loss is tried on the outputs and targets of a few examples. Losses that broadcast, that sum over a
batch or that have no gradient are refused, with the remedy.
"""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.errors import UsageError, first_line, require
from fedexp.objective import map_tensors
from fedexp.objective.losses import (
    Loss,
    check_shapes,
    class_loss,
    copied_loss,
    in_one_shape,
    reduced,
)
from fedexp.seeding import preserved_draws
from fedexp.tasks.task import BATCH_ROWS


def takes_numbers(loss: Any) -> bool:
    """Return whether a loss is one of torch's for targets that are floating-point numbers."""
    function = loss.func if isinstance(loss, partial) else loss
    return type(loss) in NUMBER_LOSSES or any(function is each for each in NUMBER_FUNCTIONS)


NUMBER_LOSSES = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss,
)  # fmt: skip
NUMBER_FUNCTIONS = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip


def takes_fractions(loss: Any) -> bool:
    """Return whether a loss is one of torch's binary cross entropies, whose targets are 0 to 1."""
    function = loss.func if isinstance(loss, partial) else loss
    own = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
    return type(loss) in (nn.BCELoss, nn.BCEWithLogitsLoss) or any(function is f for f in own)


class ResolvedLoss(NamedTuple):
    """How a loss is used.

    Attributes:
        loss: the function that is called.
        per_example: whether it returns a value for each example, or one for a batch.
        note: why a loss that could be used per example is not; else None.
    """

    loss: Loss
    per_example: bool
    note: str | None = None


def resolve_loss(loss: Any, outputs: Any, targets: Any, ignored: bool = False) -> ResolvedLoss:
    """Return a loss per example where it can be had, else the loss of a batch as it is.

    Args:
        loss: of (outputs, targets): one of torch's, or any function.
        outputs: of the model, for a few examples.
        targets: their targets.
        ignored: whether some targets of the data are those that the loss ignores.

    >>> outputs, y = torch.zeros(2, 3), torch.tensor([0, 1])
    >>> resolve_loss(F.cross_entropy, outputs, y)
    ResolvedLoss(loss=CrossEntropyLoss(), per_example=True, note=None)
    >>> resolve_loss(lambda out, y: F.cross_entropy(out, y), outputs, y).per_example
    False
    """
    require(callable(loss), f"the loss is {type(loss).__name__}, not a function or a torch loss")
    require(
        not isinstance(loss, type),
        f"the loss is the class {getattr(loss, '__name__', '')}; call it, e.g. nn.MSELoss()",
    )
    rows = len(targets if isinstance(targets, Tensor) else targets[0])
    reduction = _reduction(loss)
    require(
        reduction != "sum",
        'the loss sums over a batch; use reduction="mean", so that batches of any size count alike',
    )
    if reduction == "none" and ignored:  # zeros of ignored targets are no losses
        return resolve_loss(reduced(loss, "mean"), outputs, targets, ignored)
    if reduction in (None, "none"):
        values = _tried(loss, outputs, targets)
        require(
            values.ndim == 0 or len(values) == rows,
            f"the loss of {rows} examples has the shape {list(values.shape)}; return a value for "
            "each example, or one number",
        )
        check_shapes(outputs, targets, values)
        with preserved_draws(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that are not those of the data
            # on a copy: a loss may count its calls
            if values.ndim:
                _check_examples(copied_loss(loss), outputs, targets)
            else:
                _check_batch(copied_loss(loss), outputs, targets, values)
        return ResolvedLoss(loss, values.ndim > 0)
    plain = reduced(loss, "none")
    settings = class_loss(loss)
    weighted = settings is not None and settings.weight is not None
    values, whole = _tried(plain, outputs, targets), _tried(loss, outputs, targets)
    check_shapes(outputs, targets, values)
    if not weighted and not ignored and values.ndim and len(values) == rows:
        mean = values.flatten(1).mean(dim=1).mean() if values.ndim > 1 else values.mean()
        if torch.allclose(mean, whole, rtol=1e-4, atol=1e-6, equal_nan=True):
            return ResolvedLoss(plain, True)
    why = "it averages in its own way"
    if weighted or ignored:
        why = "classes have weights" if weighted else "some targets are ignored"
    note = f"{why}, so the loss is used as the mean over a batch, not over examples"
    if not (weighted or ignored):
        note += f"; that of more than {BATCH_ROWS} examples is reported as a mean over pieces"
    return ResolvedLoss(loss, False, note)


def _reduction(loss: Any) -> str | None:
    """Return the reduction that a loss applies, if it has such a setting."""
    if isinstance(loss, nn.Module):
        own = vars(loss).get("reduction")
        return own if isinstance(own, str) else None
    try:
        setting = inspect.signature(loss).parameters.get("reduction")
    except (TypeError, ValueError):
        return None
    return setting.default if setting is not None and isinstance(setting.default, str) else None


def _tried(loss: Any, outputs: Any, targets: Any) -> Tensor:
    """Return the loss of a few examples; raises where it rejects them or broadcasts the targets."""
    shapes = [list(each.shape) for each in (outputs, targets) if isinstance(each, Tensor)]
    example = in_one_shape(outputs, targets)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Using a target size", UserWarning)
        try:
            value = loss(outputs, targets)
        except UserWarning as error:
            raise UsageError(
                f"outputs {shapes[0]} and labels {shapes[-1]} differ in shape, and the loss would "
                f"compare each with each; give them one shape{example}"
            ) from error
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a function of the user's
            kinds = " and ".join(map(kind_of, (outputs, targets)))
            remedy = ""
            if isinstance(error, RuntimeError) and are_integers(targets):
                remedy = "; if it takes numbers, convert them to float32"
            if class_loss(loss) is not None and isinstance(targets, Tensor) and targets.ndim == 1:
                remedy = (
                    "; convert class numbers to integers, e.g. y.astype(int), or pass "
                    "loss=F.mse_loss for regression"
                )
            elif takes_numbers(loss) and len(shapes) == 2 and shapes[0] != shapes[1]:
                remedy = f"; give them one shape{example}"
            raise UsageError(
                f"the loss does not accept {kinds}: {first_line(error)}{remedy}"
            ) from error
    require(
        isinstance(value, Tensor) and value.is_floating_point(),
        f"the loss returns {kind_of(value)}; return a tensor of floating-point numbers",
    )
    return cast(Tensor, value)


def check_differentiable(loss: Any, outputs: Any, targets: Any) -> None:
    """Refuse a loss without a gradient."""
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        return
    with torch.enable_grad():
        value = _tried(loss, outputs.detach().clone().requires_grad_(), targets)
    require(
        value.requires_grad,
        "the loss has no gradient; compute it from the outputs by torch, without detach, item, "
        "numpy or argmax",
    )


def _check_examples(loss: Any, outputs: Any, targets: Any) -> None:
    """Refuse a loss per example that depends on the other examples of a batch.

    Such a loss compares each output with each target, or is a function of the batch.
    """
    same_size = _have_one_size(outputs, targets)
    pairs = [(outputs, targets)] + ([_spread(outputs, targets)] if same_size else [])
    for batch in pairs:
        try:
            whole, again = loss(*batch), loss(*batch)
            alone = [loss(*_picked(batch, [i])) for i in range(len(whole))]
        except Exception:  # it accepts other values only
            continue
        if not torch.equal(whole, again) or any(each.shape[:1] != (1,) for each in alone):
            continue  # it draws, or outputs are not sliced by their first dimension
        require(
            torch.allclose(torch.cat(alone), whole, rtol=1e-2, atol=1e-6, equal_nan=True),
            _each_with_each(outputs, targets)
            if same_size
            else "the loss of an example depends on the other examples of its batch; return one "
            "number for a batch, e.g. the mean",
        )


def _check_batch(loss: Any, outputs: Any, targets: Any, value: Tensor) -> None:
    """Refuse a loss of a batch that sums, or compares each output with each target.

    The first is as many times larger where a batch is repeated; the second is the same for targets
    in another order, and another one for outputs and targets of one shape.
    """
    rows = list(range(len(targets if isinstance(targets, Tensor) else targets[0])))
    batch = outputs, targets
    try:
        again, *repeated = (loss(*_picked(batch, rows * k)) for k in (1, 2, 3))
    except Exception:  # it may take batches of one size only
        again, repeated = value, []
    sums = [torch.allclose(each, k * value, rtol=1e-3) for k, each in enumerate(repeated, 2)]
    require(
        not (sums and all(sums) and 0 < value.abs() < torch.inf and torch.equal(value, again)),
        "the loss sums over a batch; return its mean, so that batches of any size count alike",
    )
    if not _have_one_size(outputs, targets) or len(targets) < 2:
        return
    own, target = _spread(outputs, targets)
    try:
        ordered, reversed_ = loss(own, target), loss(own, target.flip(0))
        in_shape = loss(own, target.view_as(own))
    except Exception:  # it accepts other values only
        return
    require(
        not torch.allclose(ordered, reversed_, rtol=1e-5, atol=0.0)
        or torch.allclose(ordered, in_shape, rtol=1e-5, atol=0.0),
        _each_with_each(outputs, targets),
    )


def _have_one_size(outputs: Any, targets: Any) -> bool:
    """Return whether outputs and targets may be broadcast: as many numbers in two shapes."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return False
    same = outputs.is_floating_point() and outputs.numel() == targets.numel()
    return same and 0 < outputs.ndim != targets.ndim


def _spread(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets of these shapes and types whose values differ."""
    values = torch.linspace(0.2, 0.8, outputs.numel())
    other = values if targets.is_floating_point() else values.round()
    return values.view_as(outputs).to(outputs), other.view_as(targets).to(targets)


def _picked(batch: tuple[Any, Any], rows: list[int]) -> Any:
    """Return some rows of the outputs and targets of a batch."""
    count = len(batch[1] if isinstance(batch[1], Tensor) else batch[1][0])
    return map_tensors(lambda t: t[rows] if t.ndim and len(t) == count else t, batch)


def _each_with_each(outputs: Tensor, targets: Tensor) -> str:
    return (
        f"outputs {list(outputs.shape)} and labels {list(targets.shape)} differ in shape, and the "
        f"loss compares each with each; give them one shape{in_one_shape(outputs, targets)}"
    )


def kind_of(value: Any) -> str:
    """Return the type and shape of a value, for an error message."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"


def are_integers(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())
