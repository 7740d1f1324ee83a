"""Goals and metrics: functions, torchmetrics and streaming ones, on pooled examples."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation
from fedexp.errors import DataNote, UsageError
from fedexp.tasks import Goal, Mean, Metric, Task, parse_goal, supervised
from fedexp.tasks.metrics import add_batch, add_totals, as_metrics, finish_metric

RNG = np.random.default_rng(0)
ROWS, CLIENTS = 700, 6  # more rows than are evaluated together
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
Y = (X @ RNG.normal(size=4) + RNG.normal(size=ROWS) > 0).astype(np.int64)
IDS = RNG.integers(0, CLIENTS, ROWS)


def f1(outputs: Tensor, targets: Tensor) -> float:
    """Return the F1 score of class 1, which is no mean over examples."""
    found, true = outputs.argmax(1) == 1, targets == 1
    return float(2 * (found & true).sum() / (found.sum() + true.sum()))


class F1:
    """The same, batch by batch."""

    def zero(self) -> dict[str, Tensor]:
        return {"right": torch.zeros(()), "all": torch.zeros(())}

    def add(self, total: dict[str, Tensor], outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        found, true = outputs.argmax(1) == 1, targets == 1
        new = {"right": (found & true).sum(), "all": found.sum() + true.sum()}
        return {name: total[name] + value for name, value in new.items()}

    def finish(self, total: dict[str, Tensor]) -> Tensor:
        return 2 * total["right"] / total["all"]


def task(metrics: Any, test: bool = True, **settings: Any) -> Task:
    train = Federation.from_ids({"x": X, "y": Y}, IDS)
    held_out = {"x": X, "y": Y} if test else None
    model = lambda: nn.Linear(4, 2)  # noqa: E731
    return supervised("mine", model, train, held_out, metrics=metrics, **settings)


def test_a_goal_is_parsed_and_printed() -> None:
    assert parse_goal("max:test_f1") == Goal("test_f1", higher=True)
    assert parse_goal("test_loss") == Goal("test_loss", higher=False)
    assert parse_goal("train_accuracy").higher
    assert str(parse_goal("min:test_f1")) == "min:test_f1"
    for text, message in (
        ("test_f1", "write max:test_f1 or min:test_f1"),
        ("most:test_f1", "not understood"),
        ("max:", "names no metric"),
        ("", "not understood"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_goal(text)


def test_functions_torchmetrics_and_streaming_metrics_agree_on_the_pooled_test_set() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    original = torchmetrics.F1Score(task="multiclass", num_classes=2, average=None)
    binary = torchmetrics.classification.BinaryF1Score()

    class Binary(nn.Module):
        """Its state is in a torchmetrics object, and it cannot be merged."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = torchmetrics.classification.BinaryF1Score()

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.inner.update(outputs.argmax(1), targets)

        def compute(self) -> Any:
            return self.inner.compute()

        def reset(self) -> None:
            self.inner.reset()

    own = task({"a": f1, "b": F1(), "c": Binary()}, goal="max:test_a")
    assert own.goal == Goal("test_a", higher=True)
    record = list(fx.simulate(own, fx.fedavg(), rounds=2))[-1]
    outputs = record.model()(torch.from_numpy(X)).detach()
    expected = f1(outputs, torch.from_numpy(Y))
    assert 0 < expected < 1
    for name in "abc":
        assert record.metrics[f"test_{name}"] == pytest.approx(expected, rel=1e-6)
        assert record.to_json()[f"test_{name}"] == pytest.approx(expected, rel=1e-6)
    assert "train_a" not in record.metrics
    scores = task({"accuracy_too": torchmetrics.Accuracy(task="multiclass", num_classes=2)})
    record = list(fx.simulate(scores, fx.fedavg(), rounds=2))[-1]
    assert record.metrics["test_accuracy_too"] == pytest.approx(record.test_accuracy)
    with pytest.raises(UsageError, match=r"metric 'each' returns a tensor of shape \[2\]"):
        list(fx.simulate(task({"each": original}), fx.fedavg(), rounds=1))
    assert binary.update_count == original.update_count == 0


def test_a_torchmetrics_object_is_never_updated_and_its_copies_are_merged() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.MeanSquaredError()
    metric.update(torch.ones(3), torch.zeros(3))  # left over from earlier use
    model = lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))  # noqa: E731
    train = Federation.from_ids({"x": X, "y": X[:, 0]}, IDS)
    own = supervised("mine", model, train, metrics={"mse": metric}, loss=nn.MSELoss())
    start = own.objective.initial(0)
    whole = own.evaluate(*start)
    first, second = (own.totals(*start, (part, 2)) for part in range(2))
    assert own.finish(first + second) == pytest.approx(whole)
    assert metric.compute() == 1
    predicted = own.objective.load(*start)(torch.from_numpy(X))  # type: ignore[attr-defined]
    assert whole["train_mse"] == pytest.approx(
        (predicted - torch.from_numpy(X)[:, 0]).square().mean().item()
    )


@pytest.mark.parametrize("metric", [f1, F1(), Mean(lambda out, y: (out.argmax(1) == y).float())])
def test_metrics_do_not_depend_on_the_number_of_processes(metric: Any) -> None:
    own = task({"m": metric}, by_client=True, train_metrics="clients")
    start = own.objective.initial(0)
    whole = own.evaluate(*start)
    assert whole.keys() == set(own.measured)
    for parts in (2, 5):
        first, *others = (own.totals(*start, (part, parts)) for part in range(parts))
        assert own.finish(sum(others, first)) == pytest.approx(whole, rel=1e-12)


def test_training_metrics_are_pooled_or_means_over_clients() -> None:
    expected: dict[str, float] = {}
    pooled, clients = (task({"f1": f1}, train_metrics=kind) for kind in ("pooled", "clients"))
    start = pooled.objective.initial(0)
    assert isinstance(pooled.objective, fx.objective.ModuleObjective)
    model = pooled.objective.load(*start)
    each = [pooled.train.client(client) for client in range(CLIENTS)]
    expected["clients"] = sum(f1(model(batch["x"]), batch["y"]) for batch in each) / CLIENTS
    fields = pooled.train.fields
    expected["pooled"] = f1(model(fields["x"]), fields["y"])
    assert clients.evaluate(*start)["train_f1"] == pytest.approx(expected["clients"])
    assert pooled.evaluate(*start)["train_f1"] == pytest.approx(expected["pooled"])
    assert pooled.evaluate(*start)["test_f1"] == pytest.approx(expected["pooled"])
    alone = task({"f1": f1}, test=False)
    assert alone.evaluate(*start)["train_f1"] == pytest.approx(expected["pooled"])
    assert alone.measured == ("train_loss", "train_accuracy", "train_f1")


def test_the_model_is_called_once_per_batch_for_all_metrics() -> None:
    calls = []

    class Counted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            calls.append(len(input))
            return super().forward(input)

    train = Federation.from_ids({"x": X, "y": Y}, IDS)
    metrics = {"a": f1, "b": F1(), "c": Mean(lambda out, y: (out.argmax(1) == y).float())}
    own = supervised("mine", lambda: Counted(4, 2), train, metrics=metrics, by_client=True)
    calls.clear()
    own.evaluate(*own.objective.initial(0))
    assert sum(calls) == ROWS


def test_a_metric_that_fails_is_named_in_one_line() -> None:
    def broken(outputs: Tensor, targets: Tensor) -> float:
        raise ValueError("only one class\nis present")

    for metric, message in (
        (broken, "metric 'm' fails: only one class$"),
        (lambda out, y: out, r"metric 'm' returns a tensor of shape \[700, 2\]; return one number"),
        (lambda out, y: torch.tensor(1j), "metric 'm' returns a complex number; return one"),
        (lambda out, y: "high", "metric 'm' returns 'high'; return one number"),
        (Mean(lambda out, y: out), "metric 'm' fails: Mean needs .examples., not the shape"),
    ):
        with pytest.raises(UsageError, match=message):
            list(fx.simulate(task({"m": metric}), fx.fedavg(), rounds=1))


def test_a_metric_that_is_not_a_number_is_null_and_warned_about_once() -> None:
    own = task({"m": lambda out, y: math.nan})
    with pytest.warns(DataNote, match="test_m is not a number") as notes:
        records = list(fx.simulate(own, fx.fedavg(), rounds=3))
    assert len([n for n in notes if n.category is DataNote]) == 1
    assert all(record.to_json()["test_m"] is None for record in records)
    assert records[-1].to_json()["test_accuracy"] is not None


def test_infinite_values_are_warned_about() -> None:
    own = task({"m": lambda out, y: math.inf})
    with pytest.warns(DataNote, match="test_m is infinite; it is stored as null"):
        list(fx.simulate(own, fx.fedavg(), rounds=1))
    far = replace(task({}), test={"x": torch.full((4, 4), math.inf), "y": torch.zeros(4).long()})
    with pytest.warns(DataNote, match="test_loss is"):
        list(fx.simulate(far, fx.fedavg(), rounds=1))


class Tupled:
    """A metric whose totals are joined, not added, over processes."""

    def zero(self) -> tuple[int, int]:
        return 0, 0

    def add(self, total: tuple[int, int], outputs: Tensor, targets: Tensor) -> tuple[int, int]:
        return total[0] + int((outputs.argmax(1) == targets).sum()), total[1] + len(targets)

    def finish(self, total: tuple[int, int]) -> float:
        return total[0] / total[1]


def evaluated(metric: Any) -> float:
    """Return the value of a metric, or of what is adapted to one, on two examples."""
    (adapted,) = as_metrics({"metric": metric}).values()
    total = add_batch("metric", adapted, adapted.zero(), torch.eye(2), torch.tensor([0, 1]))
    return finish_metric("metric", adapted, total)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.array(0.5), torch.tensor([0.5])])
def test_a_metric_may_return_a_number_of_any_library(value: Any) -> None:
    assert evaluated(lambda out, y: value) == 0.5


def test_totals_that_do_not_add_are_refused() -> None:
    with pytest.raises(UsageError, match="metric 'm' has totals of type tuple"):
        task({"m": Tupled()})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_metrics_on_a_gpu_are_those_on_the_cpu() -> None:
    metrics = {"f1": f1, "own": F1(), "mean": Mean(lambda out, y: (out.argmax(1) == y).float())}
    here, there = (
        next(iter(fx.simulate(task(metrics), fx.fedavg(), 1, device=device, precision="float32")))
        for device in ("cpu", "cuda")
    )
    for name in ("test_f1", "test_own", "test_mean"):
        assert there.metrics[name] == pytest.approx(here.metrics[name], abs=2 / ROWS)


def test_totals_add() -> None:
    one, two = {"a": torch.tensor(1), "b": (1,)}, {"a": torch.tensor(2), "b": (2,), "c": 3.0}
    assert add_totals(one, two) == {"a": torch.tensor(3), "b": (1, 2), "c": 3.0}
    assert isinstance(F1(), Metric)
    assert evaluated(F1()) == 1.0


def test_outputs_that_are_not_examples_first_do_not_disturb_metrics() -> None:
    class WithState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(1, 3, batch_first=True)
            self.scores = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            hidden, state = self.lstm(x[:, :, None])
            return self.scores(hidden[:, -1]), state

    train = Federation.from_ids({"x": X, "y": Y}, IDS)
    own = supervised(
        "mine",
        WithState,
        train,
        loss=lambda out, y: nn.functional.cross_entropy(out[0], y, reduction="none"),
        metrics={"f1": lambda out, y: f1(out[0], y)},
        train_metrics="clients",
        test={"x": X, "y": Y},
    )
    values = own.evaluate(*own.objective.initial(0))
    assert 0 <= values["test_f1"] <= 1
    assert 0 <= values["train_f1"] <= 1


def binary(labels: Any, metrics: Any, loss: Any = F.binary_cross_entropy_with_logits) -> Task:
    train = Federation.from_ids({"x": X, "y": labels}, IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataNote)  # of the cast
        return supervised(
            "mine", lambda: nn.Linear(4, 1), train, {"x": X, "y": labels}, loss, metrics,
            train_metrics="clients",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (np.int64, torch.int64),
        (np.uint8, torch.int64),
        (np.bool_, torch.bool),
        (np.float64, torch.float32),
    ],
)
def test_metrics_of_a_binary_cross_entropy_get_whole_numbers_as_such(
    kind: Any, expected: torch.dtype, tmp_path: Path
) -> None:
    labels = Y[:, None].astype(kind)

    def is_of_class_1(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.dtype != expected:  # an assertion would add pytest to the fingerprint
            raise TypeError(f"{targets.dtype}, not {expected}")
        return targets.ravel() == 1

    metrics = {
        "pooled": lambda out, y: is_of_class_1(out, y).float().mean(),
        "mean": Mean(is_of_class_1),
    }
    own = binary(labels, metrics)
    assert own.train.fields["y"].dtype == torch.float32  # what the loss takes
    record = next(fx.simulate(own, "fedexp", rounds=1))
    for name in metrics:
        assert record.metrics[f"test_{name}"] == pytest.approx(Y.mean())
    first, second = (fx.run(own, "fedexp", rounds=1, runs=tmp_path) for _ in range(2))
    assert first.folder == second.folder
    assert first.rows == second.rows


def test_metrics_of_whole_numbers_take_the_labels_of_a_binary_cross_entropy() -> None:
    classes = pytest.importorskip("torchmetrics").classification
    own = binary(Y[:, None], {"ap": classes.BinaryAveragePrecision()})
    assert 0 < next(fx.simulate(own, "fedexp", rounds=1)).metrics["test_ap"] <= 1


@pytest.mark.filterwarnings("ignore::fedexp.errors.DataNote")
def test_whole_numbers_of_two_types_are_given_to_metrics_as_whole_numbers() -> None:
    train = Federation.from_ids({"x": X, "y": Y.astype(np.int8)[:, None]}, IDS)
    held_out = {"x": X, "y": Y[:, None].astype(bool)}
    metrics = {"ints": lambda out, y: float(y.dtype == torch.int64)}
    own = supervised(
        "mine", lambda: nn.Linear(4, 1), train, held_out, nn.BCEWithLogitsLoss(), metrics
    )
    assert own.evaluate(*own.objective.initial(0))["test_ints"] == 1


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
@pytest.mark.filterwarnings("ignore::fedexp.errors.DataNote")
def test_metrics_of_a_regression_get_the_numbers_of_the_loss(kind: Any) -> None:
    labels = (100 * Y[:, None]).astype(kind)
    metrics = {
        "span": lambda out, y: (y - y.max()).mean(),  # whole numbers have no mean, bytes wrap
        "r2": lambda out, y: 1 - ((out - y) ** 2).mean() / ((y - y.mean()) ** 2).mean(),
    }
    train = Federation.from_ids({"x": X, "y": labels}, IDS)
    own = supervised("mine", lambda: nn.Linear(4, 1), train, loss=nn.MSELoss(), metrics=metrics)
    values = own.evaluate(*own.objective.initial(0))
    assert values["train_span"] == pytest.approx((labels - 100.0).mean())


def test_labels_that_a_transform_has_changed_are_not_cast_back() -> None:
    class Smoothing:
        def train(self, batch: Any, rng: Any) -> Any:
            return batch

        def evaluate(self, batch: Any) -> Any:
            return {**batch, "y": 0.1 + 0.8 * batch["y"]}

    train = Federation.from_ids({"x": X, "y": Y[:, None]}, IDS)
    metrics = {"mean": lambda out, y: y.mean()}
    with pytest.warns(DataNote, match="cast from int64"):
        own = supervised(
            "mine", lambda: nn.Linear(4, 1), train, loss=nn.BCEWithLogitsLoss(), metrics=metrics,
            transform=Smoothing(),  # type: ignore[arg-type]
        )  # fmt: skip
    values = own.evaluate(*own.objective.initial(0))
    assert values["train_mean"] == pytest.approx(0.1 + 0.8 * Y.mean())


def test_a_metric_that_fails_is_refused_when_the_task_is_made() -> None:
    line = (
        "metric 'ce' fails: .*; it gets outputs float32 of shape .2, 1.: convert outputs or labels "
        "in a function of .outputs, targets."
    )
    with pytest.raises(UsageError, match=line) as error:
        binary(Y[:, None], {"ce": F.binary_cross_entropy_with_logits})
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="metric 'm' returns a tensor"):
        task({"m": lambda out, y: out})
    with pytest.raises(UsageError, match="metric 'm' fails"):
        task({"m": lambda out, y: out[:, 9].mean()}, test=False)


def test_a_metric_may_need_more_than_two_examples() -> None:
    def needs_many(outputs: Tensor, targets: Tensor) -> float:
        if len(outputs) < 100:
            raise ValueError("only one class is present")
        return 0.5

    values = task({"m": needs_many}).evaluate(torch.zeros(10), fx.objective.Buffers.none())
    assert values["test_m"] == 0.5
