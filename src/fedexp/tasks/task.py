"""`Task`: a federated problem, its data, its evaluation and its default settings.

`supervised` makes one from a model, data and any torch loss; `classification` is its short form for
class numbers. The model, the loss and the data are tried on two examples when the task is made, so
that a mismatch is reported then and not in the first round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedexp.data.federation import Batch, Federation, as_tensors, check_fields
from fedexp.data.streaming import on_device
from fedexp.data.transforms import Transform
from fedexp.errors import DataNote, UsageError, first_line, require, unknown_name
from fedexp.local import LocalTraining
from fedexp.objective import (
    Buffers,
    DeviceObjective,
    Fields,
    ModuleObjective,
    Objective,
    PredictingObjective,
    map_tensors,
)
from fedexp.objective.module import Loss, class_loss, resolve_loss, takes_numbers
from fedexp.precision import Precision, widest
from fedexp.tasks.metrics import (
    Goal,
    Metric,
    add_batch,
    add_totals,
    as_metrics,
    finish_metric,
    parse_goal,
)
from fedexp.tasks.recipe import PAPER_TRAINING, Options, Recipe

Weighting = Literal["uniform", "size"]
TrainMetrics = Literal["clients", "pooled"]
Share = tuple[int, int]
# Examples per batch. On more, activations of a convolutional network do not fit a CPU's cache.
EVALUATION_ROWS = {"cpu": 512, "cuda": 2048, "mps": 512}
BATCH_ROWS = 512  # where the loss is a function of a batch: the same on every device
WORST = 10  # the worst decile is one client in so many
PROBED = 2  # examples on which a model is tried: with one, shapes that differ may look alike


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
        cohort: default number of clients per round; None for all.
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
    higher: bool | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    train_metrics: TrainMetrics | None = None
    by_client: bool = False
    test_offsets: NDArray[np.int64] | None = None

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
    def measured(self) -> tuple[str, ...]:
        """The record fields that an evaluation fills."""
        own = ["loss", "accuracy"]
        if isinstance(self.objective, PredictingObjective) and not self.objective.classifies:
            own.remove("accuracy")
        found = []
        for split in self._splits():
            worst = self.by_client and split.offsets is not None
            names = (*own, *split.metrics, *(f"{name}_worst_decile" for name in own if worst))
            found += [f"{split.name}_{name}" for name in names]
        return tuple(found)

    def to(self, device: torch.device, precision: Precision) -> Task:
        """Return the task with its data and objective on a device, computing in a precision."""
        objective = self.objective
        if not isinstance(objective, DeviceObjective):
            raise UsageError("this objective cannot change devices; give it a method `on`")
        test = self.test and {name: value.to(device) for name, value in self.test.items()}
        train = on_device(self.train, device)
        return replace(self, objective=objective.on(device, precision), train=train, test=test)

    def evaluate(self, params: Tensor, buffers: Buffers) -> dict[str, float]:
        """Return training loss F(w), the mean over all clients; test loss; accuracies and metrics.

        All clients have the same weight in F whatever their weights in training, as in the paper
        (eq. 1). Loss, accuracy and metrics share one forward pass.
        """
        return self.finish(self.totals(params, buffers))

    def evaluate_clients(self, params: Tensor, buffers: Buffers) -> dict[str, Tensor]:
        """Return loss and accuracy of each client, [clients] each, as `train_loss` and so on.

        Those of the test examples are included where these belong to clients.
        """
        task = replace(self, by_client=True, metrics={})
        return task._by_client(task.totals(params, buffers))

    def totals(self, params: Tensor, buffers: Buffers, share: Share = (0, 1)) -> Totals:
        """Return sums over the k-th of n parts of the examples, for share (k, n).

        The totals of n parts add up to those of all examples, which `finish` turns into values.
        """
        totals, objective, device = Totals(), self.objective, params.device
        per_example = not isinstance(objective, PredictingObjective) or objective.per_example
        for split in self._splits():
            weights = split.weights().to(widest(device)).to(device)
            owners = split.owners(device) if self.by_client else None
            for rows in split.pieces(per_example, params.device.type, share):
                piece = {n: value[rows].to(params.device) for n, value in split.fields.items()}
                if self.transform is not None:
                    piece = dict(self.transform.evaluate(piece))
                if isinstance(objective, PredictingObjective):
                    predicted = objective.predict(params, buffers, piece)
                    values = objective.score(*predicted)
                    if split.metrics:
                        totals.add_metrics(split, rows, *predicted, device)
                else:
                    values = objective.measure(params, buffers, piece)
                for name, value in values.items():
                    own, key = value.to(weights.dtype), f"{split.name}_{name}"
                    totals.add("means", key, own @ weights[rows])
                    if owners is not None:
                        zeros = own.new_zeros(split.clients)
                        totals.add("clients", key, zeros.index_add_(0, owners[rows], own))
        return totals.on_host()

    def finish(self, totals: Totals) -> dict[str, float]:
        """Return the values of an evaluation, given the totals of all examples."""
        values: dict[str, float] = dict(totals.means)
        for name, each in self._by_client(totals).items():
            values[f"{name}_worst_decile"] = worst_decile(each, highest=name.endswith("loss"))
        for split in self._splits():
            for name, metric in split.metrics.items():
                total = totals.metrics[f"{split.name}_{name}"]
                sets = list(total.values()) if split.metrics_by_client else [total]
                found = [finish_metric(name, metric, each) for each in sets]
                values[f"{split.name}_{name}"] = sum(found) / len(found)
        return values

    def _by_client(self, totals: Totals) -> dict[str, Tensor]:
        """Return the mean, or the sum where F_i is one, over the examples of each client."""
        if self.sums:
            return totals.clients
        sizes = {
            split.name: torch.from_numpy(np.diff(split.offsets))
            for split in self._splits()
            if split.offsets is not None
        }
        return {n: value / sizes[n.partition("_")[0]] for n, value in totals.clients.items()}

    def _splits(self) -> list[Split]:
        """Return the sets of examples of an evaluation."""
        train, rows = self.train, int(self.train.offsets[-1])
        uniform = partial(torch.full, (rows,), 1 / train.clients, dtype=torch.float64)
        weights = uniform if self.sums else partial(train.example_weights, by_size=False)
        where = self.train_metrics or ("pooled" if self.test is None else None)
        metrics, by_client = (self.metrics if where else {}), where == "clients"
        found = [Split("train", train.fields, weights, train.offsets, metrics, by_client)]
        if self.test is not None:
            rows = _rows(self.test)
            even = partial(torch.full, (rows,), 1 / rows, dtype=torch.float64)
            found.append(Split("test", self.test, even, self.test_offsets, self.metrics))
        return found


class Split(NamedTuple):
    """A set of examples to evaluate.

    Attributes:
        name: "train" or "test".
        fields: the examples.
        weights: returns the weight of each example in the means, float64.
        offsets: of the clients' examples; None where they belong to none.
        metrics: to compute.
        metrics_by_client: for each client, instead of for all examples.
    """

    name: str
    fields: Batch
    weights: Callable[[], Tensor]
    offsets: NDArray[np.int64] | None
    metrics: Mapping[str, Metric]
    metrics_by_client: bool = False

    @property
    def clients(self) -> int:
        return 0 if self.offsets is None else len(self.offsets) - 1

    def owners(self, device: torch.device) -> Tensor | None:
        """Return the client of each example, if any."""
        if self.offsets is None:
            return None
        sizes = torch.from_numpy(np.diff(self.offsets))
        return torch.arange(self.clients).repeat_interleave(sizes).to(device)

    def pieces(self, per_example: bool, device: str, share: Share) -> Iterator[slice]:
        """Yield the rows that are evaluated together, of the k-th of n parts.

        Where the loss is a function of a batch, they belong to one client, and do not depend on the
        device or on n.
        """
        part, parts = share
        if per_example:
            together = EVALUATION_ROWS.get(device, EVALUATION_ROWS["cuda"])
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
        means: weighted sums of values.
        clients: sums of values by client, [clients] each.
        metrics: totals of metrics; dicts by client where they are computed for each.
    """

    means: dict[str, Any] = field(default_factory=dict)
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
        """Return the totals on the CPU, the means as numbers."""
        return Totals(
            {name: value.item() for name, value in self.means.items()},
            {name: value.cpu() for name, value in self.clients.items()},
            {name: _on_cpu(value) for name, value in self.metrics.items()},
        )


def _zero(metric: Metric, device: torch.device) -> Any:
    return map_tensors(lambda t: t.to(device), metric.zero())


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


def supervised(
    name: str,
    model: Callable[[], nn.Module] | nn.Module,
    train: Federation,
    test: Mapping[str, Any] | Federation | None = None,
    loss: Loss = F.cross_entropy,
    metrics: Mapping[str, Any] | None = None,
    inputs: str | Sequence[str] | Mapping[str, str] = ("x",),
    label: str | Sequence[str] = "y",
    *,
    goal: str | Goal | None = None,
    target: float | None = None,
    transform: Transform | None = None,
    evaluate_every: int = 1,
    recipe: Recipe | None = None,
    local: LocalTraining = PAPER_TRAINING,
    cohort: int | None = None,
    rounds: int = 100,
    by_client: bool = False,
    train_metrics: TrainMetrics | None = None,
) -> Task:
    """Return a task from a model, data, and any loss of the model's outputs.

    The loss is used per example where it can be: torch's losses are, by `reduction="none"`, and so
    is a function that returns a value for each example. A function that returns one number is the
    loss of a batch; so is a cross entropy with class weights or with ignored targets, whose mean
    over a batch is not that of its examples. Such a loss cannot be padded, so fewer engines suit.

    Args:
        name: name of the task in records.
        model: returns a new model, e.g. `lambda: Net(classes=10)`; or a model, from whose weights
            every run starts, whatever the seed.
        train: the clients' examples.
        test: held-out examples, by field: arrays, tensors or lists; or a federation with the same
            clients, whose examples are pooled for `test_loss` and all metrics.
        loss: function of (outputs, targets), e.g. `F.cross_entropy`, `nn.MSELoss()` or your own.
        metrics: by name, functions of (outputs, targets) of all examples, torchmetrics objects, or
            `fedexp.tasks.Metric`; in records as `test_<name>`, or `train_<name>` without a test
            set. Accuracy is measured without asking where the loss is a cross entropy of class
            numbers.
        inputs: fields that the model takes, by position; or a mapping from keyword to field.
        label: field of the targets; several are given to the loss as a tuple.
        goal: the record field that decides, "max:test_f1" or "min:test_loss"; by default accuracy
            if it is measured, else the loss, on the test examples if there are any.
        target: value of the goal that counts as reached.
        transform: applied to each batch before the model, e.g. `Images`.
        evaluate_every: default number of rounds between evaluations.
        recipe: tuned options by algorithm, and a target.
        local: settings of local training; the paper's by default.
        cohort: default number of clients per round; None for all.
        rounds: default number of rounds.
        by_client: add the worst decile of clients to records, as `train_loss_worst_decile`.
        train_metrics: compute the metrics on the training examples as well: "clients" for the mean
            over clients, "pooled" for the value of all examples.

    >>> x = np.linspace(0, 1, 60).reshape(20, 3)
    >>> mine = Federation.from_ids({"x": x.astype("float32"), "y": x[:, :1].astype("float32")},
    ...                            ids=np.arange(20) % 4)
    >>> worst = lambda outputs, targets: (outputs - targets).abs().max()
    >>> supervised("mine", lambda: nn.Linear(3, 1), mine, loss=F.mse_loss, metrics={"worst": worst},
    ...            goal="min:train_worst")
    Task('mine': 4 clients, 20 examples, min:train_worst)
    """
    fields = _named_fields(inputs, label)
    test_offsets = test.offsets if isinstance(test, Federation) else None
    test = test.fields if isinstance(test, Federation) else test
    held_out = None if test is None else as_tensors(test)
    parts = {"training": train.fields} | ({} if held_out is None else {"test": held_out})
    for what, batch in parts.items():
        _check_fields(f"the {what} data", batch, fields)
    require(
        test_offsets is None or len(test_offsets) == len(train.offsets),
        f"the test data has {len(test_offsets) - 1 if test_offsets is not None else 0} clients, the"
        f" training data {train.clients}; give both the same ones, or pool the test data in a dict",
    )
    objective = ModuleObjective(model, fields=fields)
    notes: dict[str, None] = {}
    cast = partial(_cast, fields=fields, loss=loss, dtype=objective.params[0].dtype, notes=notes)
    casted = cast(train.fields)
    train = train if casted is train.fields else replace(train, fields=casted, finite=True)
    held_out = None if held_out is None else cast(held_out)
    outputs, targets = _probe(objective, train, transform, fields)
    of_classes = class_loss(loss) if _are_integers(targets) else None
    ignored = False
    if of_classes is not None:
        classes = _number_of_classes(outputs, targets)
        for what, batch in {"training": train.fields, "test": held_out or {}}.items():
            for each in (n for n in fields.label_names if n in batch):
                ignored |= _check_classes(what, batch[each], classes, of_classes.ignore_index)
    resolved = resolve_loss(loss, outputs, targets, ignored)
    if resolved.note:
        notes[resolved.note] = None
    objective = objective.with_loss(
        resolved.loss,
        classifies=of_classes is not None,
        per_example=resolved.per_example,
        ignore_index=of_classes.ignore_index if of_classes is not None and ignored else None,
    )
    if ignored:
        assert of_classes is not None
        _check_counted(train, fields.label_names[0], of_classes.ignore_index)
    adapted = as_metrics(metrics)
    require(
        not (objective.classifies and "accuracy" in adapted),
        "accuracy is measured without asking for this loss; give the metric another name",
    )
    require(
        train_metrics in ("clients", "pooled", None),
        f"train_metrics is clients, pooled or None, not {train_metrics!r}",
    )
    recipe = recipe or Recipe()
    task = Task(
        name=name,
        objective=objective,
        train=train,
        local=local,
        test=held_out,
        transform=transform,
        target=recipe.target if target is None else target,
        rounds=rounds,
        cohort=cohort,
        evaluate_every=evaluate_every,
        tuned=recipe.tuned,
        released=recipe.released,
        metrics=adapted,
        train_metrics=train_metrics,
        by_client=by_client,
        test_offsets=test_offsets,
    )
    for note in notes:
        warnings.warn(f"task {name!r}: {note}", DataNote, stacklevel=2)
    return _with_goal(task, goal)


def _with_goal(task: Task, goal: str | Goal | None) -> Task:
    """Return the task with the goal, or with the default one."""
    known = task.measured
    if goal is None:
        split = "train" if task.test is None else "test"
        accuracy = f"{split}_accuracy"
        return replace(task, metric=accuracy if accuracy in known else f"{split}_loss")
    parsed = parse_goal(goal) if isinstance(goal, str) else goal
    if parsed.metric not in known:
        raise unknown_name("record field", parsed.metric, known)
    return replace(task, metric=parsed.metric, higher=parsed.higher)


def classification(
    name: str,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    train: Federation | None = None,
    test: Mapping[str, Any] | Federation | None = None,
    *,
    build: Callable[[], nn.Module] | nn.Module | None = None,
    transform: Transform | None = None,
    local: LocalTraining = PAPER_TRAINING,
    rounds: int = 100,
    cohort: int | None = None,
    evaluate_every: int = 1,
    target: float | None = None,
    tuned: Options | None = None,
    released: Options | None = None,
    **settings: Any,
) -> Task:
    """Return a task with the cross-entropy loss, judged by its accuracy on the test examples.

    It is `supervised` for labels that are class numbers, one per example.

    Args:
        name: name of the task in records.
        model: returns a new model, e.g. `lambda: MyModel(classes=10)`, which maps `x` to class
            scores; or a model, from whose weights every run starts, whatever the seed.
        train: the clients' examples: `x`, and `y` of class numbers that start at 0.
        test: held-out examples with the same two fields; judged on the training data when None.
        build: another name of `model`.
        transform: applied to each batch before the model, e.g. `Images`.
        local: settings of local training; the paper's by default.
        rounds: default number of rounds.
        cohort: default number of clients per round; None for all.
        evaluate_every: default number of rounds between evaluations.
        target: accuracy that counts as reached.
        tuned: options by algorithm.
        released: options by algorithm in the authors' code, where they differ.
        settings: further arguments of `supervised`, e.g. `metrics` and `goal`.

    >>> x, y = torch.eye(60, 8), torch.arange(60) % 3
    >>> from fedexp.data import partition
    >>> parts = partition.dirichlet(y, clients=5, alpha=0.3, rng=np.random.default_rng(0))
    >>> mine = Federation.from_parts({"x": x, "y": y}, parts)
    >>> task = classification("mine", lambda: nn.Linear(8, 3), mine)
    >>> task.train.clients, task.metric
    (5, 'train_accuracy')
    """
    model = build if model is None else model
    if model is None or train is None:
        raise UsageError("classification needs a model and training data: name, model, train")
    label = settings.get("label", "y")
    fields = test.fields if isinstance(test, Federation) else test
    for what, batch in {"training": train.fields, "test": fields or {}}.items():
        if label in batch:
            _check_labels(f"the {what} data", label, torch.as_tensor(batch[label]))
    return supervised(
        name,
        model,
        train,
        test,
        transform=transform,
        evaluate_every=evaluate_every,
        recipe=Recipe(target, tuned or {}, released or {}),
        local=local,
        cohort=cohort,
        rounds=rounds,
        **settings,
    )


def _named_fields(
    inputs: str | Sequence[str] | Mapping[str, str], label: str | Sequence[str]
) -> Fields:
    if isinstance(inputs, str):
        inputs = (inputs,)
    named = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)
    fields = Fields(named, label if isinstance(label, str) else tuple(label))
    require(len(fields.input_names) > 0, "inputs names no field; name what the model takes")
    require(len(fields.label_names) > 0, "label names no field; name what the loss takes")
    return fields


def _check_fields(what: str, batch: Batch, fields: Fields) -> None:
    """Refuse data without the fields, without examples, or with fields of different lengths."""
    missing = sorted(set(fields.names) - set(batch))
    known = ", ".join(sorted(batch))
    require(
        not missing,
        f"{what} has no field {' or '.join(missing)}; name its fields so, or pass inputs and label "
        f"(it has {known})",
    )
    first, *others = fields.names
    require(
        len(batch[fields.names[-1]]) > 0, f"{what} holds no examples; pass None to leave it out"
    )
    for each in others:
        counts = len(batch[first]), len(batch[each])
        require(
            counts[0] == counts[1],
            f"{what} has {counts[0]} rows in {first} but {counts[1]} in {each}",
        )
    check_fields(batch)


def _check_labels(what: str, label: str, y: Tensor) -> None:
    """Refuse labels that are not class numbers, one per example."""
    require(
        _are_integers(y) and y.ndim == 1,
        f"the labels {label} of {what} are {_kind(y)}, not int64 class numbers, one per example; "
        "convert them with numpy.unique(y, return_inverse=True)",
    )


def _are_integers(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())


def _cast(
    batch: Batch, fields: Fields, loss: Loss, dtype: torch.dtype, notes: dict[str, None]
) -> Batch:
    """Return the fields in the types that model and loss take; `notes` names what was cast."""
    casted: dict[str, Tensor] = {}
    for name in fields.names:
        value, kind, is_label = batch[name], dtype, name in fields.label_names
        if is_label and _are_integers(value) and not takes_numbers(loss):
            kind = torch.int64
        elif not value.is_floating_point() and not (is_label and takes_numbers(loss)):
            continue
        if value.dtype == kind:
            continue
        casted[name] = value.to(kind)
        what, why = ("labels", "") if is_label else ("inputs", ", the type of the model")
        before, after = (str(each).removeprefix("torch.") for each in (value.dtype, kind))
        notes[f"{what} {name!r} are cast from {before} to {after}{why}"] = None
    return {**batch, **casted} if casted else batch


@torch.no_grad()
def _probe(
    objective: ModuleObjective, train: Federation, transform: Transform | None, fields: Fields
) -> tuple[Any, Any]:
    """Return outputs and targets of the first examples; raises where the model rejects them."""
    some: Batch = {name: value[:PROBED].clone() for name, value in train.fields.items()}
    if transform is not None:
        some = transform.evaluate(some)
    arguments, keywords = fields.arguments(some)
    objective.module.eval()
    try:
        return objective.module(*arguments, **keywords), fields.targets(some)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        of_bytes = [name for name in fields.input_names if some[name].dtype == torch.uint8]
        if of_bytes:
            raise UsageError(
                f"the examples {of_bytes[0]} are bytes, which the model rejects; pass "
                "transform=Images(mean, std), or convert them to float"
            ) from error
        raise UsageError(
            f"the model does not accept these examples: {first_line(error)}"
        ) from error


def _number_of_classes(outputs: Any, targets: Tensor) -> int:
    """Return the number of classes; refuse outputs that are no scores of the targets' classes."""
    require(
        isinstance(outputs, Tensor),
        f"the model returns {type(outputs).__name__}, not class scores; give a loss that takes it, "
        'e.g. loss=lambda out, y: F.cross_entropy(out["logits"], y)',
    )
    if targets.ndim == 1:
        require(
            outputs.ndim == 2 and len(outputs) == len(targets),
            "the model must return class scores of shape [examples, classes], not "
            f"{_kind(outputs[:1] if outputs.ndim else outputs)}",
        )
    else:
        expected = [len(targets), "classes", *targets.shape[1:]]
        found = [n for i, n in enumerate(outputs.shape) if i != 1]
        require(
            outputs.ndim == targets.ndim + 1 and found == list(targets.shape),
            f"the cross entropy of labels {list(targets.shape)} takes scores of shape "
            f"{str(expected).replace(chr(39), '')}, not {list(outputs.shape)}; return e.g. "
            "output.transpose(1, 2)",
        )
    return int(outputs.shape[1])


def _check_classes(what: str, y: Tensor, classes: int, ignore_index: int) -> bool:
    """Refuse labels that are no classes of the model; return whether some are ignored."""
    counted = y[y != ignore_index]
    require(
        counted.numel() > 0, f"all labels of the {what} data are {ignore_index}, which is ignored"
    )
    low, high = int(counted.min()), int(counted.max())
    require(
        low >= 0 and high < classes,
        f"the {what} labels go from {low} to {high}, but the model has the classes 0 to "
        f"{classes - 1}; number the labels from 0, or build a model with {high + 1} classes",
    )
    return counted.numel() < y.numel()


def _check_counted(train: Federation, label: str, ignore_index: int) -> None:
    """Refuse clients all of whose targets are ignored, whose loss is not a number."""
    counted = (train.fields[label] != ignore_index).flatten(1).any(dim=1).cpu().numpy()
    per_client = np.add.reduceat(counted, train.offsets[:-1].astype(np.int64))
    empty = np.flatnonzero(per_client == 0)
    if len(empty):
        raise UsageError(
            f"all targets of client {empty[0]} are {ignore_index}, which is ignored; leave such "
            "clients out"
        )


def _kind(value: Any) -> str:
    """Return the type and shape of a value, for an error message."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
