"""`Task`: a federated problem, its data, its default settings, and the evaluation of a model.

An evaluation is a sum over examples, `Totals`, so that processes can share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedexp.client import Tensors
from fedexp.cohorts import Cohort
from fedexp.data.federation import Batch, Federation
from fedexp.data.streaming import on_device
from fedexp.data.transforms import Transform
from fedexp.errors import UsageError, require, unknown_name
from fedexp.local import LocalTraining
from fedexp.objective import (
    Buffers,
    CountingObjective,
    DeviceObjective,
    ModuleObjective,
    Objective,
    PredictingObjective,
    map_tensors,
)
from fedexp.objective.base import flatten, pieces
from fedexp.precision import Precision, widest
from fedexp.tasks.metrics import BY_CLIENT, Metric, add_batch, add_totals, finish_metric
from fedexp.tasks.recipe import Goal, Options, checked_target, parse_goal

Weighting = Literal["uniform", "size"]
TrainMetrics = Literal["clients", "pooled"]
Share = tuple[int, int]
Counted = Callable[[Batch], Tensor]
Parts = Mapping[str, Tensor]  # by value: the part of each example that counts, [n]
Program = Callable[[Tensors], Tensors]
RunProgram = Callable[[Program, Tensors], Tensors]  # calls a program, or replays what it did before
# Examples per batch. On more, activations of a convolutional network do not fit a CPU's cache. A
# GPU takes as many as have so many numbers, within bounds.
EVALUATION_ROWS, EVALUATED_NUMBERS, FEWEST, MOST = 512, 2**24, 512, 8192
BATCH_ROWS = 512  # where the loss is a function of a batch: the same on every device
NO_OUTPUTS = "metrics need the outputs of the model; give the objective `predict` and `score`"
COUNTED_BATCH = (
    "a task with `counted` needs a loss per example, but this one is a mean over a batch; give the "
    "objective one by with_loss (docs/tasks.md)"
)
WORST = 10  # the worst decile is one client in so many


@dataclass(frozen=True, eq=False, repr=False)
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
    local: LocalTraining
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

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for pickle, without what evaluations have prepared."""
        return {k: v for k, v in vars(self).items() if k not in ("_splits", "_weights_on")}

    def __repr__(self) -> str:
        test = "" if self.test is None else f", {_rows(self.test):,} test examples"
        return (
            f"Task({self.name!r}: {self.train.clients:,} clients, "
            f"{_rows(self.train.fields):,} examples{test}, {self._shown_goal})"
        )

    @property
    def _shown_goal(self) -> str:
        return self.metric if self.higher is None else str(self.goal)

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
        own = ["loss", "accuracy"]
        if isinstance(self.objective, PredictingObjective) and not self.objective.classifies:
            own.remove("accuracy")
        found = []
        for split in self._splits:
            worst = self.by_client and split.offsets is not None
            names = (*own, *split.metrics, *(name + BY_CLIENT for name in own if worst))
            found += [f"{split.name}_{name}" for name in names]
        return tuple(found)

    def checked_target(self, value: float | None, option: str) -> float | None:
        """Return a value of `metric` to reach; an accuracy above 1 is percent, unless its own."""
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
        known = {*objective.names, *objective.buffer_names, *objective.module.state_dict()}
        unknown = next((name for name in state_dict if name not in known), None)
        if unknown is not None:
            raise unknown_name(f"parameter of task {self.name}", str(unknown), known)
        found = []
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
            found.append(value.to(parameter.dtype))
        return flatten(found)

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
        found: Parts = {}
        if self.counted is not None:
            found = dict.fromkeys(("loss", "accuracy"), self.counted(fields))
        elif isinstance(self.objective, CountingObjective):
            found = self.objective.counted_parts(fields)
        rows = _rows(fields)
        for part in found.values():
            require(
                part.shape == (rows,),
                f"the function `counted` of the task returns the shape {list(part.shape)}, not "
                f"[{rows}]: return one value per example",
            )
        return found

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
        # a tensor object of its own, for which an objective prepares its layers anew
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
                    own = value.to(weight.dtype)
                    totals.add("means", key, own @ weight[rows])
                    if owners is not None:
                        # on the CPU: there the order of additions is always the same
                        zeros = torch.zeros(split.clients, dtype=torch.float64)
                        totals.add(
                            "clients", key, zeros.index_add_(0, owners[rows], own.cpu().double())
                        )
        return totals

    def _weights(self, split: Split, device: torch.device) -> dict[str, Tensor]:
        """Return the weight of each example in the means, by value, in memory of the device.

        Those of values of which every example counts as one are under "". Those of the accuracy are
        `exact_weights`.
        """
        key = split.name, device
        if key not in self._weights_on:
            weights = {"": split.weights(widest(device))}
            for name, part in self.parts(split.fields).items():
                weights[name] = split.weights_of_parts(part).to(widest(device))
            weights["accuracy"] = exact_weights(weights.get("accuracy", weights[""]))
            if device.type == "cuda":  # a copy that the host does not wait for
                weights = {name: value.pin_memory() for name, value in weights.items()}
            self._weights_on[key] = {n: w.to(device, non_blocking=True) for n, w in weights.items()}
        return self._weights_on[key]

    @cached_property
    def _weights_on(self) -> dict[tuple[str, torch.device], dict[str, Tensor]]:
        return {}

    def finish(self, totals: Totals) -> dict[str, float]:
        """Return the values of an evaluation, given the totals of all examples."""
        values = {n: _bounded(n, value.sum()).item() for n, value in totals.means.items()}
        for name, each in self._by_client(totals).items():
            values[name + BY_CLIENT] = worst_decile(each, highest=name.endswith("loss"))
        for split in self._splits:
            for name, metric in split.metrics.items():
                total = totals.metrics[f"{split.name}_{name}"]
                sets = list(total.values()) if split.metrics_by_client else [total]
                found = [finish_metric(name, metric, each) for each in sets]
                values[f"{split.name}_{name}"] = sum(found) / len(found)
        return values

    def _by_client(self, totals: Totals) -> dict[str, Tensor]:
        """Return the mean, or the sum where F_i is one, over the examples of each client."""
        if self.sums or not totals.clients:
            return totals.clients
        sizes = {}
        for split in (split for split in self._splits if split.offsets is not None):
            for name, each in split.sizes(self.parts(split.fields)).items():
                sizes[f"{split.name}_{name}"] = each
        return {
            name: _bounded(name, value / sizes.get(name, sizes[name.partition("_")[0] + "_"]))
            for name, value in totals.clients.items()
        }

    @cached_property
    def _splits(self) -> list[Split]:
        """The sets of examples of an evaluation."""
        train, rows = self.train, int(self.train.offsets[-1])
        weights = uniform(rows, 1 / train.clients)
        if not self.sums:
            weights = lambda kind: train.example_weights().to(kind)  # noqa: E731
        where = self.train_metrics or ("pooled" if self.test is None else None)
        metrics, by_client = (self.metrics if where else {}), where == "clients"
        of_clients = partial(_weights_of_clients, train.offsets)
        own = (train.fields, weights, of_clients, train.offsets)
        found = [Split("train", *own, metrics, by_client)]
        if self.test is not None:
            even = uniform(_rows(self.test), 1 / _rows(self.test))
            held_out = (self.test, even, _weights_of_parts, self.test_offsets)
            found.append(Split("test", *held_out, self.metrics))
        return found


def _bounded(name: str, value: Tensor) -> Tensor:
    """Return a mean; an accuracy of fractions of examples is not rounded to more than 1."""
    if not name.endswith("_accuracy"):
        return value
    return value.masked_fill((value > 1) & (value < 1 + 1e-6), 1.0)


def exact_weights(weights: Tensor) -> Tensor:
    """Return weights [n] as a sum [n, 2], by which a mean of zeros and ones is correctly rounded.

    The first column has multiples of the precision, whose sums up to 1 are exact; the second has
    the rest of 1 / D, where the weight of every example is 1 / D for a whole number D. Other
    weights, of examples of which a fraction counts, are returned as they are.

    >>> weights = torch.full((100,), 0.01, dtype=torch.float64)
    >>> right = (torch.arange(100) < 80).double()
    >>> (right @ weights).item() == 0.8, (right @ exact_weights(weights)).sum().item() == 0.8
    (False, True)
    """
    eps, counts = torch.finfo(weights.dtype).eps, (1 / weights).round()
    if not bool(((weights * counts - 1).abs() <= 2 * eps).all()):
        return weights
    multiples = (weights / eps).round()
    return torch.stack([multiples, (1 / eps - multiples * counts) / counts], dim=1) * eps


def uniform(rows: int, weight: float) -> Callable[[torch.dtype], Tensor]:
    """Return a function that gives every example the same weight, in a type."""
    return lambda kind: torch.full((rows,), weight, dtype=kind)


def _weights_of_clients(offsets: NDArray[np.int64], parts: Tensor) -> Tensor:
    """Return the weights of training examples of which a part counts; clients count alike."""
    totals, sizes = _sums_by_client(parts, offsets), torch.from_numpy(np.diff(offsets))
    return (1 / (len(sizes) * totals)).repeat_interleave(sizes)


def _weights_of_parts(parts: Tensor) -> Tensor:
    """Return one weight for all examples: 1 over the sum of the parts that count."""
    total = parts.sum(dtype=widest(parts.device)).item()
    require(total > 0, "no test example counts; change the labels, the class weights or `counted`")
    return torch.full(parts.shape, 1 / total, dtype=torch.float64)


def _sums_by_client(values: Tensor, offsets: NDArray[np.int64]) -> Tensor:
    numbers = values.cpu().numpy().astype(np.float64)
    sums = np.add.reduceat(numbers, offsets[:-1].astype(np.int64))
    empty = np.flatnonzero(sums <= 0)
    if len(empty):
        raise UsageError(
            f"no example of client {empty[0]} counts; leave such clients out, or change the class "
            "weights or the function `counted` of the task"
        )
    return torch.from_numpy(sums)


class Split(NamedTuple):
    """A set of examples to evaluate.

    Attributes:
        name: "train" or "test".
        fields: the examples.
        weights: returns the weight of each example in the means, in a type.
        weights_of_parts: returns the same where a part of each example counts, given the parts.
        offsets: of the clients' examples; None where they belong to none.
        metrics: to compute.
        metrics_by_client: for each client, instead of for all examples.
    """

    name: str
    fields: Batch
    weights: Callable[[torch.dtype], Tensor]
    weights_of_parts: Callable[[Tensor], Tensor]
    offsets: NDArray[np.int64] | None
    metrics: Mapping[str, Metric]
    metrics_by_client: bool = False

    @property
    def clients(self) -> int:
        return 0 if self.offsets is None else len(self.offsets) - 1

    def sizes(self, parts: Parts) -> dict[str, Tensor]:
        """Return the sum of the parts that count of each client, by value; "" for all examples."""
        assert self.offsets is not None
        offsets = self.offsets
        counted = {name: _sums_by_client(part, offsets) for name, part in parts.items()}
        return {"": torch.from_numpy(np.diff(offsets)), **counted}

    def owners(self) -> Tensor | None:
        """Return the client of each example, if any."""
        if self.offsets is None:
            return None
        sizes = torch.from_numpy(np.diff(self.offsets))
        return torch.arange(self.clients).repeat_interleave(sizes)

    def pieces(self, per_example: bool, device: str, share: Share) -> Iterator[slice]:
        """Yield the rows that are evaluated together, of the k-th of n parts.

        Where the loss is one number for them, they belong to one client, and do not depend on the
        device or on n. The loss of a split is then the mean over pieces, weighted by their rows.
        """
        part, parts = share
        if per_example:
            together = EVALUATION_ROWS
            if device == "cuda":
                each = sum(value[:1].numel() for value in self.fields.values())
                together = min(MOST, max(FEWEST, EVALUATED_NUMBERS // each))
            first, last = (_rows(self.fields) * each // parts for each in (part, part + 1))
            for start in range(first, last, together):
                yield slice(start, min(start + together, last))
            return
        ends = [0, _rows(self.fields)] if self.offsets is None else self.offsets.tolist()
        cut = [
            slice(start, min(start + BATCH_ROWS, end))
            for begin, end in pairwise(ends)
            for start in range(begin, end, BATCH_ROWS)
        ]
        yield from cut[len(cut) * part // parts : len(cut) * (part + 1) // parts]

    def clients_of(self, rows: slice) -> Iterator[tuple[int, slice]]:
        """Yield the clients of some rows, with their places among these rows."""
        assert self.offsets is not None
        client = int(np.searchsorted(self.offsets, rows.start, side="right")) - 1
        start = rows.start
        while start < rows.stop:
            end = min(rows.stop, int(self.offsets[client + 1]))
            yield client, slice(start - rows.start, end - rows.start)
            client, start = client + 1, end


@dataclass(frozen=True)
class Totals:
    """Sums of an evaluation, by record field; they add over parts of the examples.

    Attributes:
        means: weighted sums of values, in one part or, of `exact_weights`, in two.
        clients: sums of values by client, [clients] each.
        metrics: totals of metrics; dicts by client where they are computed for each.
    """

    means: dict[str, Tensor] = field(default_factory=dict)
    clients: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        mine, theirs = vars(self), vars(other)
        return Totals(**{name: add_totals(mine[name], theirs[name]) for name in mine})

    def add(self, kind: Literal["means", "clients"], key: str, value: Tensor) -> None:
        """Add a value in place."""
        sums = getattr(self, kind)
        sums[key] = sums[key] + value if key in sums else value

    def add_metrics(
        self, split: Split, rows: slice, outputs: Any, targets: Any, device: torch.device
    ) -> None:
        """Add the outputs of some rows to the totals of a split's metrics, in place."""
        count = rows.stop - rows.start
        whole = map_tensors(lambda t: t.to(device), (outputs, targets))
        for name, metric in split.metrics.items():
            key = f"{split.name}_{name}"
            if not split.metrics_by_client:
                before = self.metrics[key] if key in self.metrics else _zero(metric, device)
                self.metrics[key] = add_batch(name, metric, before, *whole)
                continue
            clients = self.metrics.setdefault(key, {})
            for client, own in split.clients_of(rows):
                some = map_tensors(
                    lambda t, own=own: t[own] if t.ndim and len(t) == count else t, whole
                )
                before = clients[client] if client in clients else _zero(metric, device)
                clients[client] = add_batch(name, metric, before, *some)

    def on_host(self) -> Totals:
        """Return the totals on the CPU."""
        sizes = [value.numel() for value in self.means.values()]
        parts = [value.reshape(-1) for value in self.means.values()]
        on_cpu = torch.cat(parts).cpu().split(sizes) if parts else ()
        return Totals(
            dict(zip(self.means, on_cpu, strict=True)),
            self.clients,
            {name: _on_cpu(value) for name, value in self.metrics.items()},
        )


def _zero(metric: Metric, device: torch.device) -> Any:
    def move(total: Tensor) -> Tensor:
        return total.to(device, widest(device) if total.dtype == torch.float64 else total.dtype)

    return map_tensors(move, metric.zero())


def _on_cpu(total: Any) -> Any:
    if isinstance(total, nn.Module):
        return total.cpu()
    if isinstance(total, tuple):
        return tuple(map(_on_cpu, total))
    if isinstance(total, dict):
        return {key: _on_cpu(value) for key, value in total.items()}
    return total.cpu() if isinstance(total, Tensor) else total


def worst_decile(values: Tensor, highest: bool) -> float:
    """Return the mean of the worst tenth of clients, rounded down, at least one.

    Args:
        values: one per client.
        highest: whether the highest values are the worst.

    >>> worst_decile(torch.arange(25.0), highest=False)
    0.5
    """
    count = max(1, len(values) // WORST)
    return values.topk(count, largest=highest).values.mean().item()


def _rows(fields: Batch) -> int:
    return len(next(iter(fields.values())))
