"""`Task`: a federated problem, its data and its default settings; `classification` makes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedexp.data.federation import Batch, Federation
from fedexp.data.streaming import on_device
from fedexp.data.transforms import Transform
from fedexp.errors import UsageError, first_line, require
from fedexp.local import LocalTraining
from fedexp.objective import Buffers, DeviceObjective, ModuleObjective, Objective
from fedexp.precision import Precision, widest
from fedexp.tasks.recipe import PAPER_TRAINING, Options

Weighting = Literal["uniform", "size"]
# Examples per batch. On more, activations of a convolutional network do not fit a CPU's cache.
EVALUATION_ROWS = {"cpu": 512, "cuda": 2048, "mps": 512}


@dataclass(frozen=True, eq=False)
class Task:
    """A federated problem: objective, data and default settings.

    Attributes:
        name: name of the task on the command line and in records.
        objective: the local loss.
        train: the clients' data.
        test: held-out examples, or None.
        transform: applied to each batch before the model, or None.
        local: default settings of local training.
        metric: the record field that the task is judged by.
        target: value of `metric` that counts as reached.
        rounds: default number of rounds.
        cohort: default number of clients per round; None for all.
        evaluate_every: default number of rounds between evaluations, each a pass over the data of
            all clients.
        tuned: options by algorithm, as `--set` takes them (docs/paper.md#tuned-values).
        released: the same for the authors' code, where it differs (docs/paper.md#released-code).
        sums: whether F_i sums over examples (least squares) instead of averaging.
    """

    name: str
    objective: Objective
    train: Federation
    local: LocalTraining
    test: Batch | None = None
    transform: Transform | None = None
    metric: str = "test_accuracy"
    target: float | None = None
    rounds: int = 100
    cohort: int | None = None
    evaluate_every: int = 1
    tuned: Options = field(default_factory=dict)
    released: Options = field(default_factory=dict)
    sums: bool = False

    def to(self, device: torch.device, precision: Precision) -> Task:
        """Return the task with its data and objective on a device, computing in a precision."""
        objective = self.objective
        if not isinstance(objective, DeviceObjective):
            raise UsageError("this objective cannot change devices; give it a method `on`")
        test = self.test and {name: value.to(device) for name, value in self.test.items()}
        train = on_device(self.train, device)
        return replace(self, objective=objective.on(device, precision), train=train, test=test)

    def evaluate(
        self, params: Tensor, buffers: Buffers, share: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Return training loss F(w), the mean over all clients; test loss; accuracies if any.

        All clients have the same weight in F whatever their weights in training, as in the paper
        (eq. 1). With share (k, n) only the k-th of n parts of the examples is evaluated; the values
        of the n parts add up to the whole.
        """
        if self.sums:
            rows = len(self.train.fields["y"])
            weights = torch.full((rows,), 1 / self.train.clients, dtype=widest(params.device))
        else:
            weights = self.train.example_weights(by_size=False)
        values = self._weighted(params, buffers, self.train.fields, weights, "train", share)
        if self.test is not None:
            rows = len(self.test["y"])
            even = torch.full((rows,), 1 / rows, dtype=widest(params.device))
            values |= self._weighted(params, buffers, self.test, even, "test", share)
        return values

    def _weighted(
        self,
        params: Tensor,
        buffers: Buffers,
        batch: Batch,
        weights: Tensor,
        split: str,
        share: tuple[int, int],
    ) -> dict[str, float]:
        totals: dict[str, Tensor] = {}
        weights = weights.to(widest(params.device)).to(params.device)
        together = EVALUATION_ROWS[params.device.type]
        first, last = (len(weights) * each // share[1] for each in (share[0], share[0] + 1))
        for start in range(first, last, together):
            rows = slice(start, min(start + together, last))
            piece = {name: value[rows].to(params.device) for name, value in batch.items()}
            if self.transform is not None:
                piece = dict(self.transform.evaluate(piece))
            for name, value in self.objective.measure(params, buffers, piece).items():
                weighted = value.to(weights.dtype) @ weights[rows]
                key = f"{split}_{name}"
                totals[key] = totals[key] + weighted if key in totals else weighted
        return {name: value.item() for name, value in totals.items()}


def classification(
    name: str,
    build: Callable[[], nn.Module] | nn.Module,
    train: Federation,
    test: Batch | None = None,
    *,
    transform: Transform | None = None,
    local: LocalTraining = PAPER_TRAINING,
    rounds: int = 100,
    cohort: int | None = None,
    evaluate_every: int = 1,
    target: float | None = None,
    tuned: Options | None = None,
    released: Options | None = None,
) -> Task:
    """Return a task with the cross-entropy loss, judged by its accuracy on the test examples.

    The model is tried on one example, so that a mismatch with the data is reported now and not in
    the first round.

    Args:
        name: name of the task in records.
        build: returns a new model, e.g. `lambda: MyModel(classes=10)`, which maps `x` to class
            scores; or a model, from whose weights every run starts, whatever the seed.
        train: the clients' examples: `x`, and `y` of int64 class numbers that start at 0.
        test: held-out examples with the same two fields; judged on the training data when None.
        transform: applied to each batch before the model, e.g. `Images`.
        local: settings of local training; the paper's by default.
        rounds: default number of rounds.
        cohort: default number of clients per round; None for all.
        evaluate_every: default number of rounds between evaluations.
        target: accuracy that counts as reached.
        tuned: options by algorithm.
        released: options by algorithm in the authors' code, where they differ.

    >>> import numpy as np
    >>> x, y = torch.eye(60, 8), torch.arange(60) % 3
    >>> from fedexp.data import partition
    >>> parts = partition.dirichlet(y, clients=5, alpha=0.3, rng=np.random.default_rng(0))
    >>> mine = Federation.from_parts({"x": x, "y": y}, parts)
    >>> task = classification("mine", lambda: nn.Linear(8, 3), mine)
    >>> task.train.clients, task.metric
    (5, 'train_accuracy')
    """
    _check_fields("the training data", train.fields)
    if test is not None:
        _check_fields("the test data", test)
    objective = ModuleObjective(build)
    outputs = _outputs(objective.module, train.client(0), transform)
    for what, batch in {"training": train.fields, "test": test or {}}.items():
        _check_classes(what, batch, outputs)
    return Task(
        name=name,
        objective=objective,
        train=train,
        local=local,
        test=test,
        transform=transform,
        metric="train_accuracy" if test is None else "test_accuracy",
        target=target,
        rounds=rounds,
        cohort=cohort,
        evaluate_every=evaluate_every,
        tuned=tuned or {},
        released=released or {},
    )


def _check_fields(what: str, batch: Batch) -> None:
    """Raise `UsageError` unless the data are examples `x` with int64 class numbers `y`."""
    missing = {"x", "y"} - set(batch)
    require(not missing, f"{what} has no field {' or '.join(sorted(missing))}; name its fields so")
    y = batch["y"]
    require(
        y.dtype == torch.int64 and y.ndim == 1,
        f"the labels y of {what} are {_kind(y)}, not int64 class numbers, one per example; "
        "convert them with numpy.unique(y, return_inverse=True)",
    )
    require(len(y) > 0, f"{what} holds no examples; pass None to leave it out")
    require(len(batch["x"]) == len(y), f"{what} has {len(batch['x'])} rows in x but {len(y)} in y")


@torch.no_grad()
def _outputs(module: nn.Module, client: Batch, transform: Transform | None) -> int:
    """Return the number of classes of the model, found by calling it on one example."""
    one: Batch = {name: value[:1] for name, value in client.items()}
    if transform is not None:
        one = transform.evaluate(one)
    require(
        one["x"].dtype != torch.uint8,
        "the examples x are bytes, which models reject; pass transform=Images(mean, std), or "
        "convert them to float",
    )
    module.eval()
    try:
        scores = module(one["x"])
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"the model does not accept these examples: {first_line(error)}"
        ) from error
    require(
        isinstance(scores, Tensor) and scores.ndim == 2 and len(scores) == 1,
        f"the model must return class scores of shape [examples, classes], not {_kind(scores)}",
    )
    return int(scores.shape[1])


def _check_classes(what: str, batch: Batch, outputs: int) -> None:
    if "y" not in batch:
        return
    low, high = int(batch["y"].min()), int(batch["y"].max())
    require(
        low >= 0 and high < outputs,
        f"the {what} labels go from {low} to {high}, but the model has the classes 0 to "
        f"{outputs - 1}; number the labels from 0, or build a model with {high + 1} classes",
    )


def _kind(value: Any) -> str:
    """Return the type and shape of a value, for an error message."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
