"""`Task`: a federated problem, its data, its default settings, and the evaluation of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.client import Tensors
from fedexp.cohorts import Cohort
from fedexp.data.federation import Batch, Federation
from fedexp.data.streaming import on_device
from fedexp.data.transforms import Transform
from fedexp.errors import UsageError, check_name, is_number, require
from fedexp.local import LocalTraining
from fedexp.objective import (
    Buffers,
    CountingObjective,
    DeviceObjective,
    ModuleObjective,
    Objective,
    PredictingObjective,
)
from fedexp.objective.base import flatten, pieces
from fedexp.precision import Precision, widest
from fedexp.tasks.evaluation import (
    Share,
    Split,
    Totals,
    add_value,
    bounded_accuracy,
    equal_weights,
    exact_weights,
    rows_of,
    sums_by_client,
    weights_of_clients,
    weights_of_examples,
    worst_decile,
)
from fedexp.tasks.metrics import BY_CLIENT, Metric, finish_metric
from fedexp.tasks.recipe import PAPER_TRAINING, Goal, Options, checked_target, parse_goal

Weighting = Literal["uniform", "size"]
TrainMetrics = Literal["clients", "pooled"]
Counted = Callable[[Batch], Tensor]
Parts = Mapping[str, Tensor]  # by value: the part of each example that counts, [n]
Program = Callable[[Tensors], Tensors]
RunProgram = Callable[[Program, Tensors], Tensors]  # calls a program, or replays what it did before
NO_OUTPUTS = "metrics need the outputs of the model; give the objective `predict` and `score`"
COUNTED_BATCH = (
    "a task with `counted` needs a loss per example, but this one is a mean over a batch; give the "
    "objective one by with_loss (docs/tasks.md)"
)


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """A federated problem: objective, data and default settings.

    Attributes:
        name: name of the task on the command line and in records.
        objective: the local loss.
        train: the clients' data.
        test: held-out examples, or None.
        transform: applied to each batch before the model, or None.
        local: default settings of local training; the paper's by default.
        metric: the record field that the task is judged by.
        target: value of `metric` that counts as reached.
        rounds: default number of rounds.
        cohort: who takes part by default, see `fedexp.cohorts`; None for all clients.
        evaluate_every: default number of rounds between evaluations, each a pass over the data of
            all clients.
        tuned: options by algorithm, as `--set` takes them (docs/paper.md#tuned-values).
        released: the same for the authors' code, where it differs (docs/paper.md#released-code).
        sums: whether F_i sums over examples (least squares) instead of averaging.
        higher: whether larger values of `metric` are better; None to infer it from its name.
        metrics: further metrics of the test examples, or of the training examples if there are
            none; in records as `test_<name>` or `train_<name>`.
        train_metrics: also compute `metrics` on the training examples: "clients" for the mean over
            clients of the value on each one's examples, "pooled" for that of all of them.
        by_client: whether records have the values of the worst decile of clients.
        test_offsets: client i has the test rows test_offsets[i] to test_offsets[i + 1]; None where
            test examples belong to no client.
        counted: returns the part of each example that counts, [n] in [0, 1], e.g. the fraction of a
            sequence that is not padding; loss and accuracy of an evaluation are divided by the sum
            of these parts. None where every example counts as one, or the objective has
            `counted_parts` (ignored targets and class weights of a loss of a batch).
    """

    name: str
    objective: Objective
    train: Federation
    local: LocalTraining = PAPER_TRAINING
    test: Batch | None = None
    transform: Transform | None = None
    metric: str = "test_accuracy"
    target: float | None = None
    rounds: int = 100
    cohort: Cohort | None = None
    evaluate_every: int = 1
    tuned: Options = field(default_factory=dict)
    released: Options = field(default_factory=dict)
    sums: bool = False
    higher: bool | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    train_metrics: TrainMetrics | None = None
    by_client: bool = False
    test_offsets: NDArray[np.int64] | None = None
    counted: Counted | None = None

    def __post_init__(self) -> None:
        objective = self.objective
        per_example = not isinstance(objective, PredictingObjective) or objective.per_example
        require(self.counted is None or per_example, COUNTED_BATCH)
        is_text = isinstance(self.name, str) and self.name != ""
        require(is_text, f"the name of a task is text, not {self.name!r}")
        require(
            isinstance(self.local, LocalTraining),
            f"local is {type(self.local).__name__}; give fedexp.LocalTraining(lr=...)",
        )
        require(
            self.target is None or is_number(self.target),
            f"target is {self.target!r}; give a number, the value of the goal that counts as "
            "reached",
        )
        require(
            self.train_metrics in ("clients", "pooled", None),
            f"train_metrics is clients, pooled or None, not {self.train_metrics!r}",
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for pickle, without what evaluations have prepared."""
        return {k: v for k, v in vars(self).items() if k not in ("_splits", "_weights_on")}

    def __repr__(self) -> str:
        goal = self.metric if self.higher is None else str(self.goal)
        test = "" if self.test is None else f", {rows_of(self.test):,} test examples"
        return (
            f"Task({self.name!r}: {self.train.clients:,} clients, "
            f"{rows_of(self.train.fields):,} examples{test}, {goal})"
        )

    @property
    def goal(self) -> Goal:
        """The record field that decides, and which way is up."""
        return parse_goal(self.metric) if self.higher is None else Goal(self.metric, self.higher)

    @property
    def has_own_metric(self) -> bool:
        """Whether `metric` is one of `metrics`, not a loss or an accuracy that every task has."""
        return self.metric.partition("_")[2] in self.metrics

    @property
    def measured(self) -> tuple[str, ...]:
        """The record fields that an evaluation fills."""
        values = ["loss", "accuracy"]
        if isinstance(self.objective, PredictingObjective) and not self.objective.classifies:
            values.remove("accuracy")
        names = []
        for split in self._splits:
            by_client = self.by_client and split.offsets is not None
            worst = [value + BY_CLIENT for value in values if by_client]
            names += [f"{split.name}_{name}" for name in (*values, *split.metrics, *worst)]
        return tuple(names)

    def checked_target(self, value: float | None, option: str) -> float | None:
        """Return a value of `metric` to reach; one above 1 is percent where it is an accuracy."""
        return checked_target(value, self.metric, option, self.has_own_metric)

    def to(self, device: torch.device, precision: Precision) -> Task:
        """Return the task with its data and objective on a device, computing in a precision."""
        objective = self.objective
        if not isinstance(objective, DeviceObjective):
            raise UsageError("this objective cannot change devices; give it a method `on`")
        test = self.test and {name: value.to(device) for name, value in self.test.items()}
        train = on_device(self.train, device)
        return replace(self, objective=objective.on(device, precision), train=train, test=test)

    def to_state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        """Return a copy of a parameter vector [d] by parameter name, in torch's layout.

        For `net.load_state_dict(..., strict=False)`: it has the trained parameters, and neither
        buffers nor frozen parameters, which are in no vector; `Record.model()` has all of them.

        >>> from fedexp.tasks import digits
        >>> task = digits(model="mlp")
        >>> params, _ = task.objective.initial(0)
        >>> weights = task.to_state_dict(params)
        >>> torch.equal(task.to_vector(weights), params)
        True
        """
        views, plain = self.named_views(vector).items(), torch.contiguous_format
        return {name: view.detach().clone(memory_format=plain) for name, view in views}

    def to_vector(self, state_dict: Mapping[str, Any]) -> Tensor:
        """Return the trained parameters of a `state_dict` as one vector [d], as in a state.

        The inverse of `to_state_dict`. Of a whole model's `state_dict`, all else is left out. The
        parameters are cast to the types of the task's.
        """
        objective = self._module_objective()
        require(
            isinstance(state_dict, Mapping),
            f"to_vector takes a state_dict, not {type(state_dict).__name__}; give tensors by name",
        )
        names = {*objective.names, *objective.buffer_names, *objective.module.state_dict()}
        for name in state_dict:
            check_name(f"parameter of task {self.name}", str(name), names)
        values = []
        for name, parameter in zip(objective.names, objective.params, strict=True):
            require(
                name in state_dict, f"the state_dict has no {name}; give all trained parameters"
            )
            try:
                value = torch.as_tensor(state_dict[name]).detach()
                is_real = not value.is_complex()
            except (TypeError, ValueError, RuntimeError):
                is_real = False
            require(is_real, f"{name} does not hold real numbers; give a tensor of them")
            shape, wanted = list(value.shape), list(parameter.shape)
            require(
                shape == wanted,
                f"{name} has the shape {shape}, that of task {self.name} {wanted}; give the "
                "state_dict of the same model",
            )
            values.append(value.to(parameter.dtype))
        return flatten(values)

    def named_views(self, vectors: Tensor) -> dict[str, Tensor]:
        """Return views of vectors [..., d] by parameter name, for rules that look at layers.

        They share the memory of the vectors, e.g. of the mean update of a round, and have the
        shapes of torch. Those of convolutions are not contiguous: in a vector, channels are last.
        """
        objective = self._module_objective()
        size = sum(parameter.numel() for parameter in objective.params)
        shape = list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        require(
            isinstance(shape, list) and shape[-1:] == [size],
            f"task {self.name} has {size} parameters, but the vector is {shape}; give one such as "
            "record.state.params",
        )
        return dict(zip(objective.names, pieces(vectors, objective.params), strict=True))

    def _module_objective(self) -> ModuleObjective:
        if not isinstance(self.objective, ModuleObjective):
            raise UsageError(
                f"task {self.name} has no nn.Module, so its vectors have no named parts; use them "
                "as they are"
            )
        return self.objective

    def evaluate(
        self, params: Tensor, buffers: Buffers, run: RunProgram | None = None
    ) -> dict[str, float]:
        """Return training loss F(w), the mean over all clients; test loss; accuracies and metrics.

        All clients have the same weight in F whatever their weights in training, as in the paper
        (eq. 1). Loss, accuracy and metrics share one forward pass. `run` is for `totals`.
        """
        return self.finish(self.totals(params, buffers, run=run))

    def evaluate_clients(self, params: Tensor, buffers: Buffers) -> dict[str, Tensor]:
        """Return loss and accuracy of each client, [clients] each, as `train_loss` and so on.

        Those of the test examples are included where these belong to clients.
        """
        task = replace(self, by_client=True, metrics={})
        return task._by_client(task.totals(params, buffers))

    def parts(self, fields: Batch) -> Parts:
        """Return the part of each example that counts, [n], by value: "loss" and "accuracy".

        Where a value is not named, every example counts as one.
        """
        parts: Parts = {}
        if self.counted is not None:
            parts = dict.fromkeys(("loss", "accuracy"), self.counted(fields))
        elif isinstance(self.objective, CountingObjective):
            parts = self.objective.counted_parts(fields)
        rows = rows_of(fields)
        for part in parts.values():
            require(
                part.shape == (rows,),
                f"the function `counted` of the task returns the shape {list(part.shape)}, not "
                f"[{rows}]: return one value per example",
            )
        return parts

    def totals(
        self, params: Tensor, buffers: Buffers, share: Share = (0, 1), run: RunProgram | None = None
    ) -> Totals:
        """Return sums over the k-th of n parts of the examples, for share (k, n).

        The totals of n parts add up to those of all examples, which `finish` turns into values.

        Args:
            params: the parameters, [d].
            buffers: the buffers.
            share: the part, and the number of parts.
            run: calls the program of the sums, which is the same for all parameters: a CUDA graph
                may replay it. Not used where metrics or sums by client are computed on the host.
        """
        fields = [value for split in self._splits for value in split.fields.values()]
        static = all(value.device == params.device for value in fields) and not self.by_client
        if run is None or not static or any(split.metrics for split in self._splits):
            return self._totals(params, buffers, share).on_host()
        for split in self._splits:  # beforehand, since the host may wait for the device here
            self._weights(split, params.device)
        inputs = {"params": params, "averaged": buffers.averaged, "kept": buffers.kept}
        return Totals(dict(run(partial(self._means, share=share), inputs))).on_host()

    def _means(self, inputs: Tensors, share: Share) -> dict[str, Tensor]:
        """Return the weighted sums of an evaluation, without waiting for the device."""
        # a new tensor object, for which an objective prepares its layers anew
        params = inputs["params"].detach()
        return self._totals(params, Buffers(inputs["averaged"], inputs["kept"]), share).means

    def _totals(self, params: Tensor, buffers: Buffers, share: Share) -> Totals:
        totals, objective, device = Totals(), self.objective, params.device
        per_example = not isinstance(objective, PredictingObjective) or objective.per_example
        for split in self._splits:
            weights = self._weights(split, device)
            owners = split.owners() if self.by_client else None
            together = per_example or "loss" in weights
            for rows in split.pieces(together, params.device.type, share):
                piece = {n: value[rows].to(params.device) for n, value in split.fields.items()}
                if self.transform is not None:
                    piece = dict(self.transform.evaluate(piece))
                if isinstance(objective, PredictingObjective):
                    predicted = objective.predict(params, buffers, piece)
                    values = objective.score(*predicted)
                    if split.metrics:
                        totals.add_metrics(split, rows, *predicted, device)
                else:
                    require(not split.metrics, NO_OUTPUTS)
                    values = objective.measure(params, buffers, piece)
                for name, value in values.items():
                    weight, key = weights.get(name, weights[""]), f"{split.name}_{name}"
                    value = value.to(weight.dtype)
                    add_value(totals.means, key, value @ weight[rows])
                    if owners is not None:
                        # on the CPU: there the order of additions is always the same
                        sums = torch.zeros(split.clients, dtype=torch.float64)
                        sums.index_add_(0, owners[rows], value.cpu().double())
                        add_value(totals.clients, key, sums)
        return totals

    def _weights(self, split: Split, device: torch.device) -> dict[str, Tensor]:
        """Return the weight of each example in the means, by value, in memory of the device.

        Those of values of which every example counts as one are under "". Those of the accuracy are
        `exact_weights`.
        """
        key = split.name, device
        if key not in self._weights_on:
            parts = self._parts_of(split).items()
            weights = {name: split.weights(part).to(widest(device)) for name, part in parts}
            weights["accuracy"] = exact_weights(weights.get("accuracy", weights[""]))
            if device.type == "cuda":  # a copy that the host does not wait for
                weights = {name: value.pin_memory() for name, value in weights.items()}
            self._weights_on[key] = {n: w.to(device, non_blocking=True) for n, w in weights.items()}
        return self._weights_on[key]

    def _parts_of(self, split: Split) -> Parts:
        """Return the part of each example that counts; "" for values that `parts` does not name."""
        return {"": torch.ones(rows_of(split.fields)), **self.parts(split.fields)}

    @cached_property
    def _weights_on(self) -> dict[tuple[str, torch.device], dict[str, Tensor]]:
        return {}

    def finish(self, totals: Totals) -> dict[str, float]:
        """Return the values of an evaluation, given the totals of all examples."""
        values = {n: bounded_accuracy(n, v.sum()).item() for n, v in totals.means.items()}
        for name, of_clients in self._by_client(totals).items():
            values[name + BY_CLIENT] = worst_decile(of_clients, highest=name.endswith("loss"))
        for split in self._splits:
            for name, metric in split.metrics.items():
                sets = totals.metrics[f"{split.name}_{name}"].values()
                of_sets = [finish_metric(name, metric, total) for total in sets]
                values[f"{split.name}_{name}"] = sum(of_sets) / len(of_sets)
        return values

    def _by_client(self, totals: Totals) -> dict[str, Tensor]:
        """Return the mean, or the sum where F_i is one, over the examples of each client."""
        if self.sums or not totals.clients:
            return totals.clients
        sizes = {}
        for split in self._splits:
            if split.offsets is not None:
                for name, part in self._parts_of(split).items():
                    sizes[f"{split.name}_{name}"] = sums_by_client(part, split.offsets)
        return {
            name: bounded_accuracy(
                name, value / sizes.get(name, sizes[name.partition("_")[0] + "_"])
            )
            for name, value in totals.clients.items()
        }

    @cached_property
    def _splits(self) -> list[Split]:
        """The sets of examples of an evaluation."""
        train = self.train
        weights = partial(weights_of_clients, train.offsets)
        if self.sums:
            weights = partial(equal_weights, 1 / train.clients)
        where = self.train_metrics or ("pooled" if self.test is None else None)
        metrics, by_client = (self.metrics if where else {}), where == "clients"
        splits = [Split("train", train.fields, weights, train.offsets, metrics, by_client)]
        if self.test is not None:
            splits.append(
                Split("test", self.test, weights_of_examples, self.test_offsets, self.metrics)
            )
        return splits
