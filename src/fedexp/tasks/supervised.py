"""`supervised`: a task from a model, data and any torch loss; `classification` for class numbers.

The model, the loss, the metrics and the data are tried on two examples when the task is made, so
that a mismatch is reported then and not in the first round. Data are cast to the types that the
model and the loss take, with a `DataNote`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedexp.data import federation
from fedexp.data.federation import Batch, Federation
from fedexp.data.transforms import Transform
from fedexp.errors import DataNote, UsageError, check_name, first_line, require
from fedexp.objective import Fields, ModuleObjective, losses
from fedexp.objective.hidden_state import check_repeatable
from fedexp.objective.losses import ClassLoss, Loss
from fedexp.seeding import preserved_draws
from fedexp.tasks.evaluation import sums_by_client
from fedexp.tasks.metrics import AsGiven, add_batch, as_metrics, finish_metric
from fedexp.tasks.recipe import Goal, Settings, parse_goal
from fedexp.tasks.task import Task, TrainMetrics

HALF = (
    "the parameters are in half precision, in which small updates are lost; build the model in "
    'float32, and pass precision="bf16" for fast arithmetic'
)
UNTRACKED = (
    "BatchNorm without running statistics makes losses and accuracies depend on which examples are "
    "evaluated together, hence on their order; build it with track_running_stats=True"
)
PROBED_LABELS = 10_000  # among which two examples with different labels are looked for


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
    transform: Transform | None = None,
    train_metrics: TrainMetrics | None = None,
    **settings: Unpack[Settings],
) -> Task:
    """Return a task from a model, data, and any loss of the model's outputs.

    The loss is used per example where it can be: torch's losses are, by `reduction="none"`, and so
    is a function that returns a value for each example. A function that returns one number is the
    loss of a batch; so is a cross entropy with class weights or with ignored targets, whose mean
    over a batch is not that of its examples. Such a loss cannot be padded, so fewer engines suit.
    Reported are the loss of all examples with weights or ignored targets, and for other losses of a
    batch the mean over pieces of at most 512 examples of one client, weighted by their rows.

    What forward or the loss changes besides buffers is refused, and so are tensors that share their
    memory with a weight: neither is carried from round to round (docs/study.md).

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
            set. They get the targets as the loss does, but whole numbers and booleans of a binary
            cross entropy as such, and are tried here. Accuracy is measured without asking where the
            loss is a cross entropy of class numbers.
        inputs: fields that the model takes, by position; or a mapping from keyword to field.
        label: field of the targets; several are given to the loss as a tuple.
        goal: the record field that decides, "max:test_f1" or "min:test_loss"; by default accuracy
            if it is measured, else the loss, on the test examples if there are any.
        transform: applied to each batch before the model, e.g. `Images`.
        train_metrics: compute the metrics on the training examples as well: "clients" for the mean
            over clients, "pooled" for the value of all examples.
        settings: attributes of the `Task`: `target`, the value of the goal that counts as reached;
            `local`, `rounds`, `cohort` and `evaluate_every`, defaults of a run; `tuned` and
            `released`, options by algorithm; `by_client`, to add the worst decile of clients to
            records, as `train_loss_worst_decile`.

    >>> import numpy as np
    >>> x = np.linspace(0, 1, 60).reshape(20, 3)
    >>> mine = Federation.from_ids({"x": x.astype("float32"), "y": x[:, :1].astype("float32")},
    ...                            ids=np.arange(20) % 4)
    >>> worst = lambda outputs, targets: (outputs - targets).abs().max()
    >>> supervised("mine", lambda: nn.Linear(3, 1), mine, loss=F.mse_loss, metrics={"worst": worst},
    ...            goal="min:train_worst")
    Task('mine': 4 clients, 20 examples, min:train_worst)
    """
    fields = _named_fields(inputs, label)
    data = _data_of(train, test, fields)
    label_types = {batch[n].dtype for batch in data.values() for n in fields.label_names}
    objective = ModuleObjective(model, fields=fields)
    notes = _notes_on(objective)
    data = {what: _cast(batch, loss, objective, notes) for what, batch in data.items()}
    if data["training"] is not train.fields:
        train = replace(train, fields=data["training"], finite=True)
    with preserved_draws():
        probes = {what: _probe(objective, batch, transform, what) for what, batch in data.items()}
        outputs, targets = probes["training"]
        of_classes = losses.class_loss(loss) if losses.are_integers(targets) else None
        ignored = False
        if of_classes is not None:
            labels = {what: batch[fields.label_names[0]] for what, batch in data.items()}
            ignored = _check_classes(labels, _number_of_classes(outputs, targets), of_classes)
        resolved = losses.resolve_loss(loss, outputs, targets, ignored)
        if losses.takes_fractions(loss):
            _check_fractions(data, fields)
        _try_test_targets(resolved.loss, probes)
    objective = objective.with_loss(
        resolved.loss,
        classifies=of_classes is not None,
        per_example=resolved.per_example,
        ignore_index=of_classes.ignore_index if of_classes is not None and ignored else None,
    )
    check_repeatable(objective, 0, train.fields, transform)
    adapted = as_metrics({} if metrics is None else metrics)
    if losses.takes_fractions(loss) and not any(kind.is_floating_point for kind in label_types):
        whole = torch.bool if label_types == {torch.bool} else torch.int64
        adapted = {name: AsGiven(metric, whole) for name, metric in adapted.items()}
    require(
        not (objective.classifies and "accuracy" in adapted),
        "accuracy is measured without asking for this loss; give the metric another name",
    )
    task = Task(
        name=name,
        objective=objective,
        train=train,
        test=data.get("test"),
        transform=transform,
        metrics=adapted,
        train_metrics=train_metrics,
        test_offsets=test.offsets if isinstance(test, Federation) else None,
        **settings,
    )
    for part in task.parts(train.fields).values():
        sums_by_client(part, train.offsets)  # refuses clients without a target that counts
    measured = probes.values() if train_metrics else [list(probes.values())[-1]]
    _try_metrics(task, measured)
    if resolved.note:
        notes.append(resolved.note)
    for note in dict.fromkeys(notes):
        warnings.warn(f"task {name!r}: {note}", DataNote, stacklevel=2)
    return _with_goal(task, goal)


def _with_goal(task: Task, goal: str | Goal | None) -> Task:
    """Return the task with the goal, or with the default one, and its target in its unit."""
    if goal is None:
        split = "train" if task.test is None else "test"
        metric = f"{split}_accuracy" if f"{split}_accuracy" in task.measured else f"{split}_loss"
        task = replace(task, metric=metric)
    else:
        parsed = parse_goal(goal) if isinstance(goal, str) else goal
        check_name("record field", parsed.metric, task.measured)
        task = replace(task, metric=parsed.metric, higher=parsed.higher)
    if not task.metric.endswith("accuracy"):  # a loss of your own may be negative
        return task
    return replace(task, target=task.checked_target(task.target, "target"))


def classification(
    name: str,
    model: Callable[[], nn.Module] | nn.Module,
    train: Federation,
    test: Mapping[str, Any] | Federation | None = None,
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
        settings: further arguments of `supervised`, e.g. `transform`, `local`, `rounds`, `cohort`,
            `target`, an accuracy, `metrics` and `goal`.

    >>> import numpy as np
    >>> x, y = torch.eye(60, 8), torch.arange(60) % 3
    >>> from fedexp.data import partition
    >>> parts = partition.dirichlet(y, clients=5, alpha=0.3, rng=np.random.default_rng(0))
    >>> mine = Federation.from_parts({"x": x, "y": y}, parts)
    >>> task = classification("mine", lambda: nn.Linear(8, 3), mine)
    >>> task.train.clients, task.metric
    (5, 'train_accuracy')
    """
    fields = _named_fields(settings.get("inputs", "x"), settings.get("label", "y"))
    for what, batch in _data_of(train, test, fields).items():
        for label in fields.label_names:
            y = batch[label]
            require(
                losses.are_integers(y) and y.ndim == 1,
                f"the labels {label} of the {what} data are {losses.kind_of(y)}, not int64 class "
                "numbers, one per example; convert them with numpy.unique(y, return_inverse=True)",
            )
    return supervised(name, model, train, test, **settings)


def _data_of(
    train: Federation, test: Mapping[str, Any] | Federation | None, fields: Fields
) -> dict[str, Batch]:
    """Return the examples by their use, "training" and "test"; refuse what cannot be used."""
    require(
        isinstance(train, Federation),
        f"train is {type(train).__name__}, not a Federation; make one with "
        'fedexp.Federation.from_ids({"x": x, "y": y}, ids)',
    )
    data: dict[str, Batch] = {"training": train.fields}
    if isinstance(test, Federation):
        require(
            test.clients == train.clients,
            f"the test data has {test.clients} clients, the training data {train.clients}; give "
            "both the same ones, or pool the test data in a dict",
        )
        data["test"] = test.fields
    elif test is not None:
        require(
            isinstance(test, Mapping),
            f'test is {type(test).__name__}; give its fields by name, e.g. {{"x": x, "y": y}}',
        )
        data["test"] = federation.as_tensors(test)
    for what, batch in data.items():
        missing = sorted(set(fields.names) - set(batch))
        require(
            not missing,
            f"the {what} data has no field {' or '.join(missing)}; name its fields so, or pass "
            f"inputs and label (it has {', '.join(sorted(batch))})",
        )
    if "test" in data:
        try:
            rows = federation.check_fields(data["test"])
        except UsageError as error:
            raise UsageError(f"test data: {error}; leave out what no example has") from error
        require(rows > 0, "the test data holds no examples; pass None to leave it out")
        federation.check_finite(data["test"], "the test data")
    return data


def _named_fields(
    inputs: str | Sequence[str] | Mapping[str, str], label: str | Sequence[str]
) -> Fields:
    for what, names in {"inputs": inputs, "label": label}.items():
        valid = isinstance(names, str | Sequence | Mapping)
        require(valid, f'{what} is {names!r}; name the fields, e.g. {what}="x"')
        require(len(names) > 0, f'{what} names no field; name one, e.g. {what}="x"')
    if isinstance(inputs, str):
        inputs = (inputs,)
    named = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)
    return Fields(named, label if isinstance(label, str) else tuple(label))


def _notes_on(objective: ModuleObjective) -> list[str]:
    """Return what the user should know about the model."""
    notes, layers = [], objective.module.modules()
    if any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in layers):
        notes.append(UNTRACKED)
    if objective.params[0].dtype in (torch.bfloat16, torch.float16):
        notes.append(HALF)
    return notes


def _cast(batch: Batch, loss: Loss, objective: ModuleObjective, notes: list[str]) -> Batch:
    """Return the fields in the types that model and loss take, and add to the notes."""
    fields, casted = objective.fields, dict[str, Tensor]()
    for name in fields.names:
        value, kind, is_label = batch[name], objective.params[0].dtype, name in fields.label_names
        if is_label and losses.are_integers(value) and not losses.takes_numbers(loss):
            kind = torch.int64
        elif not value.is_floating_point() and not (is_label and losses.takes_numbers(loss)):
            continue
        if value.dtype == kind:
            continue
        casted[name] = value.to(kind)
        before, after = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, kind))
        require(
            federation.all_finite(casted[name]),
            f"values of {name!r} exceed the range of {after}, the type of the model; scale them "
            "down",
        )
        what, why = ("labels", "") if is_label else ("inputs", ", the type of the model")
        notes.append(f"{what} {name!r} are cast from {before} to {after}{why}")
    return {**batch, **casted} if casted else batch


@torch.no_grad()
def _probe(
    objective: ModuleObjective, batch: Batch, transform: Transform | None, what: str
) -> tuple[Any, Any]:
    """Return outputs and targets of two examples; raises where the model rejects them.

    With one, shapes that differ may look alike. Their labels differ, if any do, so that the value
    of a loss that compares each with each differs as well.
    """
    fields = objective.fields
    labels = batch[fields.label_names[0]][:PROBED_LABELS]
    other = int((labels != labels[:1]).reshape(len(labels), -1).any(dim=1).int().argmax())
    rows = [0, other or 1][: len(labels)]
    some: Batch = {name: value[rows] for name, value in batch.items()}
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
                f"the {what} examples {of_bytes[0]} are bytes, which the model rejects; pass "
                "transform=Images(mean, std), or convert them to float"
            ) from error
        kinds = ", ".join(f"{name} {losses.kind_of(some[name])}" for name in fields.input_names)
        whole = [name for name in fields.input_names if losses.are_integers(some[name])]
        remedy = f"; convert {whole[0]} to float32" if whole and "dtype" in str(error) else ""
        raise UsageError(
            f"the model does not accept these {what} examples ({kinds}): "
            f"{first_line(error)}{remedy}"
        ) from error


def _try_test_targets(loss: Loss, probes: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse test examples that the loss rejects."""
    if "test" not in probes:
        return
    try:
        losses.try_loss(losses.copied_loss(loss), *probes["test"])
    except UsageError as error:
        kind = losses.kind_of(probes["training"][1])
        raise UsageError(f"test data: {error}; targets of the training data are {kind}") from error


def _try_metrics(task: Task, probes: Iterable[tuple[Any, Any]]) -> None:
    """Refuse metrics that fail on two examples, and on all, since two may be too few for one."""
    try:
        with preserved_draws(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few examples
            for outputs, targets in probes:
                for name, metric in task.metrics.items():
                    total = add_batch(name, metric, metric.zero(), outputs, targets)
                    finish_metric(name, metric, total)
    except UsageError:
        try:
            with preserved_draws():
                task.evaluate(*task.objective.initial(0))
        except UsageError as error:
            if not any(word in str(error) for word in ("type", "bool")):
                raise
            raise UsageError(
                f"{error}; it gets outputs {losses.kind_of(outputs)}: convert outputs or labels in "
                "a function of (outputs, targets) that calls the metric"
            ) from error


def _number_of_classes(outputs: Any, targets: Tensor) -> int:
    """Return the number of classes; refuse outputs that are not scores of the targets' classes."""
    require(
        isinstance(outputs, Tensor),
        f"the model returns {type(outputs).__name__}, not class scores; give a loss that takes it, "
        'e.g. loss=lambda out, y: F.cross_entropy(out["logits"], y)',
    )
    require(
        outputs.ndim != 2 or targets.shape != (len(outputs), 1),
        f"the labels have the shape {list(targets.shape)}; give one class number per example, of "
        f"shape {list(targets.shape[:1])}, e.g. y[:, 0]",
    )
    rest = "".join(f", {size}" for size in targets.shape[1:])
    remedy = "; return e.g. output.transpose(1, 2)" if rest else ""
    require(
        outputs.ndim > 1 and (len(outputs), *outputs.shape[2:]) == targets.shape,
        f"the model must return class scores of shape [examples, classes{rest}], not "
        f"{losses.kind_of(outputs[:1] if outputs.ndim else outputs)}{remedy}",
    )
    return int(outputs.shape[1])


def _check_classes(labels: Mapping[str, Tensor], classes: int, loss: ClassLoss) -> bool:
    """Refuse labels that are not classes of the model; return whether some are ignored."""
    some_are_ignored = False
    for what, y in labels.items():
        ignored = y == loss.ignore_index
        counted = y[~ignored] if ignored.any() else y
        require(
            counted.numel() > 0,
            f"all labels of the {what} data are {loss.ignore_index}, which is ignored",
        )
        low, high = int(counted.min()), int(counted.max())
        require(
            low >= 0 and high < classes,
            f"the {what} labels go from {low} to {high}, but the model has the classes 0 to "
            f"{classes - 1}; number the labels from 0, or build a model with {high + 1} classes",
        )
        some_are_ignored |= counted.numel() < y.numel()
    return some_are_ignored


def _check_fractions(data: Mapping[str, Batch], fields: Fields) -> None:
    """Refuse targets of a binary cross entropy outside [0, 1], with which it has no lower bound."""
    for what, batch in data.items():
        for name in fields.label_names:
            low, high = batch[name].min().item(), batch[name].max().item()
            require(
                low >= 0 and high <= 1,
                f"the targets {name} of the {what} data are {low:g} to {high:g}, those of a binary "
                "cross entropy 0 to 1; scale them, or take another loss",
            )
