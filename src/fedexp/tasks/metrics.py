"""Metrics of a task: the protocol `Metric`, and adapters for functions and torchmetrics.

A metric is computed on pooled examples, batch by batch. Its totals add, so batches and the
processes of a run are sums. Functions of all outputs and targets (F1 of scikit-learn) and objects
of torchmetrics are adapted: their totals are tuples, which add by concatenation.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from fedexp.errors import UsageError, first_line, require
from fedexp.objective import map_tensors

Function = Callable[[Any, Any], Any]  # of (outputs, targets)
BY_CLIENT = "_worst_decile"  # ends the names of what `Task.by_client` adds to records


@runtime_checkable
class Metric(Protocol):
    """A metric that is computed batch by batch.

    Totals are tensors, or dicts of tensors, that add: the total of two sets of examples is the sum
    of their totals. Outputs, targets and totals are on the device of the run. Implement the three
    methods for a metric that need not hold all outputs.

    >>> class WithinOne:
    ...     def zero(self):
    ...         return torch.zeros(2)
    ...
    ...     def add(self, total, outputs, targets):
    ...         close = ((outputs - targets).abs() <= 1).float()
    ...         return total + torch.stack([close.sum(), torch.ones_like(close).sum()])
    ...
    ...     def finish(self, total):
    ...         return total[0] / total[1]
    >>> isinstance(WithinOne(), Metric)
    True
    >>> metric = WithinOne()
    >>> total = metric.add(metric.zero(), torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0]))
    >>> metric.finish(total).item()
    0.5
    """

    def zero(self) -> Any:
        """Return the total of no examples."""

    def add(self, total: Any, outputs: Any, targets: Any) -> Any:
        """Return the total with a batch added, given the model's outputs and the targets."""

    def finish(self, total: Any) -> Any:
        """Return the value of the metric: one number."""


@runtime_checkable
class UpdatingMetric(Protocol):
    """A metric with state, as those of torchmetrics are."""

    def update(self, outputs: Any, targets: Any) -> None: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


@runtime_checkable
class MergingMetric(UpdatingMetric, Protocol):
    """A metric with state that can add the state of another metric."""

    def merge_state(self, incoming_state: Any) -> None: ...


@dataclass(frozen=True)
class Mean:
    """The mean over examples of a function's values, one per example.

    Args:
        function: maps outputs and targets to [B].

    >>> error = Mean(lambda outputs, targets: (outputs - targets).abs())
    >>> error.finish(error.add(error.zero(), torch.tensor([1.0, 2.0]), torch.tensor([2.0, 5.0])))
    2.0
    """

    function: Function

    def zero(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64)

    def add(self, total: Tensor, outputs: Any, targets: Any) -> Tensor:
        values = torch.as_tensor(self.function(outputs, targets)).detach()
        require(values.ndim == 1, f"Mean needs [examples], not the shape {list(values.shape)}")
        values = values.to(total)
        return total + torch.stack([values.sum(), values.new_tensor(float(len(values)))])

    def finish(self, total: Tensor) -> float:
        return (total[0] / total[1]).item()


@dataclass(frozen=True)
class PooledFunction:
    """A function of the outputs and targets of all examples, which it gets on the CPU.

    Its total is a tuple of batches, so all outputs are held until it is called.
    """

    function: Function

    def zero(self) -> tuple[Any, ...]:
        return ()

    def add(self, total: tuple[Any, ...], outputs: Any, targets: Any) -> tuple[Any, ...]:
        # copies: outputs may be views of what the next batch overwrites
        return (*total, map_tensors(lambda t: t.detach().to("cpu", copy=True), (outputs, targets)))

    def finish(self, total: tuple[Any, ...]) -> Any:
        outputs, targets = map_tensors(_concatenated, *total)
        return self.function(outputs, targets)


def _concatenated(*parts: Tensor) -> Any:
    """Return one tensor of all examples; a tuple where they are not along the first dimension."""
    alike = len({part.shape[1:] for part in parts}) == 1 and parts[0].ndim > 0
    return torch.cat(parts) if alike else parts


@dataclass(frozen=True)
class UpdatedMetric:
    """A metric of torchmetrics; its total is a tuple of copies, one per process.

    The object itself is never updated.
    """

    metric: MergingMetric

    def zero(self) -> tuple[MergingMetric, ...]:
        return ()

    def add(
        self, total: tuple[MergingMetric, ...], outputs: Any, targets: Any
    ) -> tuple[MergingMetric, ...]:
        if not total:
            total = (_fresh_copy(self.metric, outputs),)
        total[-1].update(outputs, targets)
        return total

    def finish(self, total: tuple[MergingMetric, ...]) -> Any:
        first, *others = total
        merged = deepcopy(first) if others else first
        for other in others:
            merged.merge_state(other)
        return merged.compute()


@dataclass(frozen=True)
class ComputedOnce:
    """A function of (outputs, targets): a metric with state, updated once."""

    metric: UpdatingMetric

    def __call__(self, outputs: Any, targets: Any) -> Any:
        metric = _fresh_copy(self.metric, outputs)
        metric.update(outputs, targets)
        return metric.compute()


@dataclass(frozen=True)
class AsGiven:
    """A metric that gets whole numbers or booleans as targets, which the loss casts to fractions.

    Targets that a transform has made other numbers of are not cast back.
    """

    metric: Metric
    kind: torch.dtype

    def zero(self) -> Any:
        return self.metric.zero()

    def add(self, total: Any, outputs: Any, targets: Tensor) -> Any:
        whole = targets.to(self.kind)
        same = torch.equal(whole.to(targets.dtype), targets)
        return self.metric.add(total, outputs, whole if same else targets)

    def finish(self, total: Any) -> Any:
        return self.metric.finish(total)


def _fresh_copy(metric: UpdatingMetric, outputs: Any) -> Any:
    """Return a copy without state, on the device of the outputs."""
    fresh = deepcopy(metric)
    fresh.reset()
    if isinstance(fresh, nn.Module) and isinstance(outputs, Tensor):
        fresh.to(outputs.device)
    return fresh


def as_metrics(metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """Return metrics by name, those that are functions or objects with state adapted."""
    require(
        isinstance(metrics, Mapping),
        f'metrics is {type(metrics).__name__}; give metrics by name, e.g. {{"f1": f1}}',
    )
    return {name: _as_metric(name, value) for name, value in metrics.items()}


def _as_metric(name: Any, value: Any) -> Metric:
    """Return a metric, adapted if it is a function or an object with state."""
    require(
        isinstance(name, str) and name.isidentifier() and name != "loss",
        f"a metric cannot be called {name!r}; take a name of letters, digits and underscores, "
        "other than loss",
    )
    require(
        not name.endswith(BY_CLIENT),
        f"a metric cannot be called {name!r}: by_client gives its values names that end in "
        f"{BY_CLIENT}; take another name",
    )
    require(
        not isinstance(value, type),
        f"metric {name!r} is the class {getattr(value, '__name__', '')}; call it with its "
        "arguments",
    )
    if isinstance(value, Metric):
        adapted, zero = isinstance(value, PooledFunction | UpdatedMetric), value.zero()
        require(
            adapted or not isinstance(zero, tuple | list),
            f"metric {name!r} has totals of type {type(zero).__name__}, which do not add up "
            "over processes; make them a tensor, or a dict of tensors",
        )
        return value
    if isinstance(value, MergingMetric):
        return UpdatedMetric(value)
    if isinstance(value, UpdatingMetric):
        return PooledFunction(ComputedOnce(value))
    require(
        callable(value),
        f"metric {name!r} is {type(value).__name__}; give a function of (outputs, targets),"
        " a torchmetrics object or a fedexp.tasks.Metric",
    )
    return PooledFunction(value)


def add_totals(total: Any, other: Any) -> Any:
    """Return the sum of two totals; dicts are added key by key."""
    if not isinstance(total, dict):
        return total + other
    common = {key: add_totals(total[key], other[key]) for key in total if key in other}
    return {**total, **other, **common}


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Raise errors of a metric, which may be a function of the user's, with its name."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(f"metric {name!r} fails: {first_line(error)}") from error


def add_batch(name: str, metric: Metric, total: Any, outputs: Any, targets: Any) -> Any:
    """Return a metric's total with a batch added; an error names the metric."""
    with _named(name):
        return metric.add(total, outputs, targets)


def finish_metric(name: str, metric: Metric, total: Any) -> float:
    """Return the value of a metric; an error names it."""
    with _named(name):
        value = metric.finish(total)
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    if isinstance(value, numbers.Real) or is_one:
        return float(value)
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    if isinstance(value, Tensor) and value.is_complex():
        what = "a complex number"
    raise UsageError(f"metric {name!r} returns {what[:80]}; return one number")
