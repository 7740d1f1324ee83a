"""`supervised`: a task from a model, data and any torch loss; `classification` for class numbers.

The model, the loss, the metrics and the data are tried on two examples when the task is made, so
that a mismatch is reported then and not in the first round. Data are cast to the types that the
model and the loss take, with a `DataNote`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedexp.cohorts import Cohort
from fedexp.data.federation import Batch, Federation, all_finite, as_tensors, check_finite
from fedexp.data.transforms import Transform
from fedexp.errors import DataNote, UsageError, first_line, require, unknown_name
from fedexp.local import LocalTraining
from fedexp.objective import Fields, ModuleObjective
from fedexp.objective.hidden_state import check_repeatable
from fedexp.objective.losses import Loss, class_loss, copied_loss
from fedexp.seeding import preserved_draws
from fedexp.tasks.metrics import AsGiven, add_batch, as_metrics, finish_metric
from fedexp.tasks.recipe import PAPER_TRAINING, Goal, Options, Recipe, parse_goal
from fedexp.tasks.resolve_loss import (
    are_integers,
    check_differentiable,
    kind_of,
    resolve_loss,
    takes_fractions,
    takes_numbers,
)
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
    target: float | None = None,
    transform: Transform | None = None,
    evaluate_every: int = 1,
    recipe: Recipe | None = None,
    local: LocalTraining = PAPER_TRAINING,
    cohort: Cohort | None = None,
    rounds: int = 100,
    by_client: bool = False,
    train_metrics: TrainMetrics | None = None,
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
        target: value of the goal that counts as reached.
        transform: applied to each batch before the model, e.g. `Images`.
        evaluate_every: default number of rounds between evaluations.
        recipe: tuned options by algorithm, and a target.
        local: settings of local training; the paper's by default.
        cohort: who takes part by default: a number, a fraction, a list of clients or a function
            (`fedexp.cohorts`); None for all.
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
    require(isinstance(name, str) and name != "", f"the name of a task is text, not {name!r}")
    _check_kinds(train, test, local, metrics, target)
    fields = _named_fields(inputs, label)
    test_offsets = test.offsets if isinstance(test, Federation) else None
    test = test.fields if isinstance(test, Federation) else test
    held_out: Batch | None = None if test is None else as_tensors(test)
    parts = {"training": train.fields} | ({} if held_out is None else {"test": held_out})
    for what, batch in parts.items():
        _check_fields(f"the {what} data", batch, fields)
    check_finite({} if held_out is None else held_out, "the test data")
    require(
        test_offsets is None or len(test_offsets) == len(train.offsets),
        f"the test data has {len(test_offsets) - 1 if test_offsets is not None else 0} clients, the"
        f" training data {train.clients}; give both the same ones, or pool the test data in a dict",
    )
    objective = ModuleObjective(model, fields=fields)
    notes: dict[str, None] = {}
    cast = partial(_cast, fields=fields, loss=loss, dtype=objective.params[0].dtype, notes=notes)
    given = {batch[n].dtype for batch in parts.values() for n in fields.label_names}
    casted = cast(train.fields)
    train = train if casted is train.fields else replace(train, fields=casted, finite=True)
    held_out = None if held_out is None else cast(held_out)
    layers = objective.module.modules()
    if any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in layers):
        notes[UNTRACKED] = None
    if objective.params[0].dtype in (torch.bfloat16, torch.float16):
        notes[HALF] = None
    outputs, targets = _probe(objective, train.fields, transform, fields)
    probed = [(outputs, targets)] if held_out is None or train_metrics else []
    of_classes = class_loss(loss) if are_integers(targets) else None
    ignored = False
    if of_classes is not None:
        classes = _number_of_classes(outputs, targets)
        for what, batch in {"training": train.fields, "test": held_out or {}}.items():
            for each in (n for n in fields.label_names if n in batch):
                ignored |= _check_classes(what, batch[each], classes, of_classes.ignore_index)
    resolved = resolve_loss(loss, outputs, targets, ignored)
    check_differentiable(resolved.loss, outputs, targets)
    _check_fractions(loss, fields, {"training": train.fields, "test": held_out or {}})
    if held_out is not None:
        example = objective, resolved.loss, held_out, transform, fields, targets
        probed.append(_check_test_examples(*example))
    if resolved.note:
        notes[resolved.note] = None
    objective = objective.with_loss(
        resolved.loss,
        classifies=of_classes is not None,
        per_example=resolved.per_example,
        ignore_index=of_classes.ignore_index if of_classes is not None and ignored else None,
    )
    check_repeatable(objective, 0, train.fields, transform)
    if ignored:
        assert of_classes is not None
        _check_counted(train, fields.label_names[0], of_classes.ignore_index)
    adapted = as_metrics(metrics) if metrics else {}
    if takes_fractions(loss) and all(not kind.is_floating_point for kind in given):
        whole = torch.bool if given == {torch.bool} else torch.int64
        adapted = {name: AsGiven(metric, whole) for name, metric in adapted.items()}
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
    _try_metrics(task, probed)
    for note in notes:
        warnings.warn(f"task {name!r}: {note}", DataNote, stacklevel=2)
    task = _with_goal(task, goal)
    if not task.metric.endswith("accuracy"):  # a loss of your own may be negative
        return task
    return replace(task, target=task.checked_target(task.target, "target"))


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
    cohort: Cohort | None = None,
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
        cohort: who takes part by default: a number, a fraction, a list of clients or a function
            (`fedexp.cohorts`); None for all.
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
    _check_kinds(train, test, local, settings.get("metrics"), target)
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


def _check_kinds(train: Any, test: Any, local: Any, metrics: Any, target: Any) -> None:
    """Refuse arguments of another type than the one they stand for."""
    require(
        isinstance(train, Federation),
        f"train is {type(train).__name__}, not a Federation; make one with "
        'fedexp.Federation.from_ids({"x": x, "y": y}, ids)',
    )
    require(
        test is None or isinstance(test, Mapping | Federation),
        f'test is {type(test).__name__}; give its fields by name, e.g. {{"x": x, "y": y}}',
    )
    require(
        isinstance(local, LocalTraining),
        f"local is {type(local).__name__}; give fedexp.LocalTraining(lr=...)",
    )
    require(
        metrics is None or isinstance(metrics, Mapping),
        f'metrics is {type(metrics).__name__}; give metrics by name, e.g. {{"f1": f1}}',
    )
    require(
        target is None or (isinstance(target, Real) and not isinstance(target, bool)),
        f"target is {target!r}; give a number, the value of the goal that counts as reached",
    )


def _named_fields(
    inputs: str | Sequence[str] | Mapping[str, str], label: str | Sequence[str]
) -> Fields:
    for what, given in {"inputs": inputs, "label": label}.items():
        valid = isinstance(given, str | Sequence | Mapping)
        require(valid, f'{what} is {given!r}; name the fields, e.g. {what}="x"')
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
    first, *others = dict.fromkeys((*fields.names, *batch))
    for each in (first, *others):
        require(
            batch[each].ndim > 0, f"{each} of {what} is a single number; give one row per example"
        )
    require(
        len(batch[fields.names[-1]]) > 0, f"{what} holds no examples; pass None to leave it out"
    )
    for each in others:
        counts = len(batch[first]), len(batch[each])
        require(
            counts[0] == counts[1],
            f"{what} has {counts[0]} rows in {first} but {counts[1]} in {each}; give one row per "
            "example, or leave it out",
        )


def _check_labels(what: str, label: str, y: Tensor) -> None:
    """Refuse labels that are not class numbers, one per example."""
    require(
        are_integers(y) and y.ndim == 1,
        f"the labels {label} of {what} are {kind_of(y)}, not int64 class numbers, one per example; "
        "convert them with numpy.unique(y, return_inverse=True)",
    )


def _cast(
    batch: Batch, fields: Fields, loss: Loss, dtype: torch.dtype, notes: dict[str, None]
) -> Batch:
    """Return the fields in the types that model and loss take; `notes` names what was cast."""
    casted: dict[str, Tensor] = {}
    for name in fields.names:
        value, kind, is_label = batch[name], dtype, name in fields.label_names
        if is_label and are_integers(value) and not takes_numbers(loss):
            kind = torch.int64
        elif not value.is_floating_point() and not (is_label and takes_numbers(loss)):
            continue
        if value.dtype == kind:
            continue
        casted[name] = value.to(kind)
        require(
            all_finite(casted[name]),
            f"values of {name!r} exceed the range of {str(kind).removeprefix('torch.')}, the type "
            "of the model; scale them down",
        )
        what, why = ("labels", "") if is_label else ("inputs", ", the type of the model")
        before, after = (str(each).removeprefix("torch.") for each in (value.dtype, kind))
        notes[f"{what} {name!r} are cast from {before} to {after}{why}"] = None
    return {**batch, **casted} if casted else batch


@torch.no_grad()
def _probe(
    objective: ModuleObjective,
    batch: Batch,
    transform: Transform | None,
    fields: Fields,
    what: str = "examples",
) -> tuple[Any, Any]:
    """Return outputs and targets of two examples; raises where the model rejects them.

    With one, shapes that differ may look alike. Their labels differ, if any do, so that a loss that
    compares each with each is another one.
    """
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
                f"the {what} {of_bytes[0]} are bytes, which the model rejects; pass "
                "transform=Images(mean, std), or convert them to float"
            ) from error
        given = ", ".join(f"{name} {kind_of(some[name])}" for name in fields.input_names)
        whole = [name for name in fields.input_names if are_integers(some[name])]
        remedy = f"; convert {whole[0]} to float32" if whole and "dtype" in str(error) else ""
        raise UsageError(
            f"the model does not accept these {what} ({given}): {first_line(error)}{remedy}"
        ) from error


def _check_test_examples(
    objective: ModuleObjective,
    loss: Loss,
    test: Batch,
    transform: Transform | None,
    fields: Fields,
    targets: Any,
) -> tuple[Any, Any]:
    """Return outputs and targets of test examples; refuse those that model or loss rejects."""
    with preserved_draws():
        outputs, found = _probe(objective, test, transform, fields, "test examples")
    try:
        with preserved_draws(), torch.no_grad():
            copied_loss(loss)(outputs, found)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        kinds = [
            kind_of(each) if isinstance(each, Tensor) else type(each).__name__
            for each in (found, targets)
        ]
        raise UsageError(
            f"the loss does not accept the test targets ({kinds[0]}, in training {kinds[1]}): "
            f"{first_line(error)}; give both the same kind"
        ) from error
    return outputs, found


def _try_metrics(task: Task, probed: Sequence[tuple[Any, Any]]) -> None:
    """Refuse metrics that fail on two examples, and on all, since two may be too few for one."""
    for outputs, targets in probed:
        try:
            with preserved_draws(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of few examples
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
                    f"{error}; it gets outputs {kind_of(outputs)}: convert outputs or labels in a "
                    "function of (outputs, targets) that calls the metric"
                ) from error


def _number_of_classes(outputs: Any, targets: Tensor) -> int:
    """Return the number of classes; refuse outputs that are no scores of the targets' classes."""
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
    if targets.ndim == 1:
        require(
            outputs.ndim == 2 and len(outputs) == len(targets),
            "the model must return class scores of shape [examples, classes], not "
            f"{kind_of(outputs[:1] if outputs.ndim else outputs)}",
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


def _check_fractions(loss: Loss, fields: Fields, parts: Mapping[str, Batch]) -> None:
    """Refuse targets of a binary cross entropy outside [0, 1], with which it has no lower bound."""
    if not takes_fractions(loss):
        return
    for what, batch in parts.items():
        for name in (name for name in fields.label_names if name in batch):
            low, high = batch[name].min().item(), batch[name].max().item()
            require(
                low >= 0 and high <= 1,
                f"the targets {name} of the {what} data are {low:g} to {high:g}, those of a binary "
                "cross entropy 0 to 1; scale them, or take another loss",
            )


def _check_classes(what: str, y: Tensor, classes: int, ignore_index: int) -> bool:
    """Refuse labels that are no classes of the model; return whether some are ignored."""
    ignored = y == ignore_index
    counted = y[~ignored] if ignored.any() else y
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
    y = train.fields[label]
    counted = (y != ignore_index).reshape(len(y), -1).any(dim=1).cpu().numpy()
    per_client = np.add.reduceat(counted, train.offsets[:-1].astype(np.int64))
    empty = np.flatnonzero(per_client == 0)
    if len(empty):
        raise UsageError(
            f"all targets of client {empty[0]} are {ignore_index}, which is ignored; leave such "
            "clients out"
        )
