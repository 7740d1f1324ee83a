"""Losses: what torch's own are, how one is used, and the shapes that it compares.

A loss is used per example, or as one number for a batch. `resolve_loss` finds out which by a trial
on the outputs and targets of a few examples. Losses that broadcast, that sum over a batch or that
have no gradient are refused, with the remedy.

The mean of a cross entropy with ignored targets or class weights is not the mean over examples. It
is one number for a batch in training; in an evaluation each example has the sum over its targets
and counts as much as they do, so that all examples have the loss that torch returns for them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.errors import UsageError, first_line, require
from fedexp.identity import HOOKS
from fedexp.objective.base import map_tensors
from fedexp.precision import widest
from fedexp.seeding import preserved_draws

Loss = Callable[[Any, Any], Tensor]  # of (outputs, targets)
BATCH_ROWS = 512  # examples of an evaluation with one value of a loss of a batch

FRACTION_LOSSES = (  # their targets are fractions from 0 to 1
    nn.BCELoss, nn.BCEWithLogitsLoss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
)  # fmt: skip
NUMBER_LOSSES = (  # their targets are floating-point numbers
    *FRACTION_LOSSES, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss,
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
)  # fmt: skip


def takes_numbers(loss: Any) -> bool:
    """Return whether a loss is one of torch's for targets that are floating-point numbers."""
    return _is_one_of(loss, NUMBER_LOSSES)


def takes_fractions(loss: Any) -> bool:
    """Return whether a loss is one of torch's binary cross entropies, whose targets are 0 to 1."""
    return _is_one_of(loss, FRACTION_LOSSES)


def _is_one_of(loss: Any, losses: Sequence[Any]) -> bool:
    """Return whether a loss is one of these functions, with settings or not, or of these types."""
    function = loss.func if isinstance(loss, partial) else loss
    return any(function is other or type(loss) is other for other in losses)


def overrides(module: nn.Module) -> bool:
    """Return whether a call does more than the class defines: hooks, or a replaced forward."""
    return "forward" in vars(module) or any(getattr(module, name) for name in HOOKS)


def ignored_target(loss: Any) -> int | None:
    """Return the target that a loss ignores if it is the plain cross-entropy, else None.

    >>> ignored_target(nn.CrossEntropyLoss(reduction="none")), ignored_target(nn.MSELoss())
    (-100, None)
    """
    if type(loss) is not nn.CrossEntropyLoss or loss.weight is not None:
        return None
    is_plain = loss.reduction == "none" and not loss.label_smoothing
    return loss.ignore_index if is_plain and not overrides(loss) else None


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
    moves_all = isinstance(target, torch.device)
    settings = {
        name: value.to(target)
        if isinstance(value, Tensor) and (moves_all or value.is_floating_point())
        else value
        for name, value in loss.keywords.items()
    }
    return partial(loss.func, *loss.args, **settings)


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
    reduction = _reduction(loss)
    require(
        reduction != "sum",
        'the loss sums over a batch; use reduction="mean", so that batches of any size count alike',
    )
    if reduction == "none" and ignored:  # zeros of ignored targets are no losses
        loss, reduction = reduced(loss, "mean"), "mean"
    if reduction in (None, "none"):
        return ResolvedLoss(loss, _is_per_example(loss, outputs, targets))
    plain, rows = reduced(loss, "none"), examples_of(targets)
    values, mean = try_loss(plain, outputs, targets), try_loss(loss, outputs, targets)
    check_shapes(outputs, targets, values)
    settings = class_loss(loss)
    used = "so the loss is used as the mean over a batch, not over examples"
    if settings is not None and settings.weight is not None:
        return ResolvedLoss(loss, False, f"classes have weights, {used}")
    if ignored:
        return ResolvedLoss(loss, False, f"some targets are ignored, {used}")
    if values.ndim and len(values) == rows:
        mean_of_values = values.reshape(rows, -1).mean(dim=1).mean()
        if torch.allclose(mean_of_values, mean, rtol=1e-4, atol=1e-6, equal_nan=True):
            return ResolvedLoss(plain, True)
    note = f"that of more than {BATCH_ROWS} examples is reported as a mean over pieces"
    return ResolvedLoss(loss, False, f"it averages in its own way, {used}; {note}")


def _is_per_example(loss: Any, outputs: Any, targets: Any) -> bool:
    """Return whether a loss without a reduction to choose returns a value for each example."""
    values, rows = try_loss(loss, outputs, targets), examples_of(targets)
    require(
        values.ndim == 0 or len(values) == rows,
        f"the loss of {rows} examples has the shape {list(values.shape)}; return a value for "
        "each example, or one number",
    )
    check_shapes(outputs, targets, values)
    copied = copied_loss(loss)  # a loss may count its calls
    with preserved_draws(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are not those of the data
        if values.ndim:
            _check_examples(copied, outputs, targets)
        else:
            _check_batch(copied, outputs, targets, values)
    return values.ndim > 0


def _reduction(loss: Any) -> str | None:
    """Return the reduction that a loss applies, if it has such a setting."""
    if isinstance(loss, nn.Module):
        setting = vars(loss).get("reduction")
    else:
        try:
            parameter = inspect.signature(loss).parameters.get("reduction")
        except (TypeError, ValueError):
            return None
        setting = parameter and parameter.default
    return setting if isinstance(setting, str) else None


def try_loss(loss: Any, outputs: Any, targets: Any) -> Tensor:
    """Return the loss of a few examples.

    A loss that raises an error, that broadcasts the targets or that has no gradient is refused.
    """
    shapes = [list(value.shape) for value in (outputs, targets) if isinstance(value, Tensor)]
    example = in_one_shape(outputs, targets)
    differentiable = isinstance(outputs, Tensor) and outputs.is_floating_point()
    if differentiable:
        outputs = outputs.detach().clone().requires_grad_()
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.filterwarnings("error", "Using a target size", UserWarning)
        try:
            value = loss(outputs, targets)
        except UserWarning as error:
            what = (
                f"outputs {shapes[0]} and labels {shapes[-1]}" if shapes else "outputs and labels"
            )
            raise UsageError(
                f"{what} differ in shape, and the loss would compare each with each; give them one "
                f"shape{example}"
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
    require(
        value.requires_grad or not differentiable,
        "the loss has no gradient; compute it from the outputs by torch, without detach, item, "
        "numpy or argmax",
    )
    return cast(Tensor, value.detach())


def _check_examples(loss: Any, outputs: Any, targets: Any) -> None:
    """Refuse a loss per example that depends on the other examples of a batch.

    Such a loss compares each output with each target, or is a function of the batch.
    """
    broadcasts = _may_broadcast(outputs, targets)
    batches = [(outputs, targets)] + ([_spread(outputs, targets)] if broadcasts else [])
    for batch in batches:
        try:
            values, repeated = loss(*batch), loss(*batch)
            alone = [loss(*picked(batch, [row], len(values))) for row in range(len(values))]
        except Exception:  # it accepts other values only
            continue
        if not torch.equal(values, repeated) or any(value.shape[:1] != (1,) for value in alone):
            continue  # it draws, or outputs are not sliced by their first dimension
        require(
            torch.allclose(torch.cat(alone), values, rtol=1e-2, atol=1e-6, equal_nan=True),
            _each_with_each(outputs, targets)
            if broadcasts
            else "the loss of an example depends on the other examples of its batch; return one "
            "number for a batch, e.g. the mean",
        )


def _check_batch(loss: Any, outputs: Any, targets: Any, value: Tensor) -> None:
    """Refuse a loss of a batch that sums, or compares each output with each target.

    The first is as many times larger where a batch is repeated; the second is the same for targets
    in another order, and differs for outputs and targets of one shape.
    """
    rows, batch = list(range(examples_of(targets))), (outputs, targets)
    try:
        again, *repeated = (loss(*picked(batch, rows * times, len(rows))) for times in (1, 2, 3))
    except Exception:  # it may take batches of one size only
        again, repeated = value, []
    sums = [torch.allclose(total, k * value, rtol=1e-3) for k, total in enumerate(repeated, 2)]
    require(
        not (sums and all(sums) and 0 < value.abs() < torch.inf and torch.equal(value, again)),
        "the loss sums over a batch; return its mean, so that batches of any size count alike",
    )
    if not _may_broadcast(outputs, targets) or len(rows) < 2:
        return
    output, target = _spread(outputs, targets)
    try:
        ordered, reversed_ = loss(output, target), loss(output, target.flip(0))
        in_shape = loss(output, target.view_as(output))
    except Exception:  # it accepts other values only
        return
    require(
        not torch.allclose(ordered, reversed_, rtol=1e-5, atol=0.0)
        or torch.allclose(ordered, in_shape, rtol=1e-5, atol=0.0),
        _each_with_each(outputs, targets),
    )


def _may_broadcast(outputs: Any, targets: Any) -> bool:
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


def picked(values: Any, rows: list[int] | slice, count: int) -> Any:
    """Return some rows of outputs and targets that have `count`; other tensors are left as is."""
    return map_tensors(lambda t: t[rows] if t.ndim and len(t) == count else t, values)


def examples_of(targets: Any) -> int:
    """Return the number of examples that have these targets: a tensor, or a tuple of several."""
    return len(targets if isinstance(targets, Tensor) else targets[0])


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
    """Return whether a value is a tensor of whole numbers; booleans are not."""
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())
