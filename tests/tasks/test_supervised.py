"""`supervised`: tasks of any model, loss and data, proven in every engine that suits them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation
from fedexp.engine.base import client_loss
from fedexp.engine.select import EngineName
from fedexp.errors import DataNote, UsageError
from fedexp.objective import ModuleObjective
from fedexp.tasks import Task, classification, supervised

RNG = np.random.default_rng(0)
CLIENTS, ROWS, WORDS, LENGTH = 5, 60, 11, 6
IDS = np.sort(RNG.integers(0, CLIENTS, ROWS))
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
CLASSES = RNG.integers(0, 3, ROWS)
TOKENS = RNG.integers(0, WORDS, (ROWS, LENGTH))
LENGTHS = RNG.integers(3, LENGTH + 1, ROWS)
PADDING = np.arange(LENGTH)[None] >= LENGTHS[:, None]
NEXT = np.where(PADDING, -100, np.roll(TOKENS, -1, axis=1))
LARGE = X.astype(np.float64) * 1e39
LOCAL = fx.LocalTraining(lr=0.1, steps=3, batch_size=4)
ALGORITHM = fx.fedexp(eps=1e-3)


def clients(**fields: Any) -> Federation:
    return Federation.from_ids(fields, IDS)


class Tagger(nn.Module):
    """A transformer of tokens and a mask, with class scores for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.scores = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.layer(self.words(tokens), src_key_padding_mask=mask)
        scores: Tensor = self.scores(hidden).transpose(1, 2)
        return scores


class NextToken(nn.Module):
    """An LSTM that returns scores and its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.scores = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Any]:
        hidden, state = self.lstm(self.words(tokens))
        return self.scores(hidden), state


class Pair(nn.Module):
    """Two inputs by keyword, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(2, 5)
        self.last = nn.Linear(5, 2)

    def forward(self, *, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        mean, spread = self.last(torch.tanh(self.left(a) + self.right(b))).unbind(1)
        return {"mean": mean, "spread": F.softplus(spread) + 0.1}


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class WithDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Output:
        hidden = torch.relu(self.first(x))
        return Output(self.last(hidden), hidden)


class LowRank(nn.Module):
    """A frozen layer with a trained update of low rank, as a plain module."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted() -> nn.Module:
    return nn.Sequential(LowRank(nn.Linear(4, 16)), nn.ReLU(), LowRank(nn.Linear(16, 3)))


def gaussian(outputs: dict[str, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    y, weight = targets
    return weight * F.gaussian_nll_loss(outputs["mean"], y, outputs["spread"], reduction="none")


def next_token_loss(outputs: tuple[Tensor, Any], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0].transpose(1, 2), targets)


def quiet(make: Callable[[], Task]) -> Task:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataNote)
        return make()


def tagging() -> Task:
    train = clients(tokens=TOKENS, mask=PADDING, y=NEXT)
    return supervised("tags", Tagger, train, inputs=("tokens", "mask"))


def whole_sentences() -> Task:
    train = clients(tokens=TOKENS, mask=np.zeros_like(PADDING), y=TOKENS)
    return supervised("tags", Tagger, train, inputs={"tokens": "tokens", "mask": "mask"})


def next_token() -> Task:
    return supervised("next", NextToken, clients(x=TOKENS, y=NEXT), loss=next_token_loss)


def multi_label() -> Task:
    labels = np.stack([X[:, 0] > 0, X[:, 1] > 0], axis=1)
    return supervised(
        "labels", lambda: nn.Linear(4, 2), clients(x=X, y=labels), loss=nn.BCEWithLogitsLoss()
    )


def regression() -> Task:
    train = clients(a=X, b=X[:, :2], y=X.sum(axis=1), w=np.ones(ROWS, np.float32))
    inputs = {"a": "a", "b": "b"}
    return supervised("pair", Pair, train, loss=gaussian, inputs=inputs, label=("y", "w"))


def with_dataclass() -> Task:
    loss = lambda out, y: F.cross_entropy(out.logits, y, reduction="none")  # noqa: E731
    return supervised("object", WithDataclass, clients(x=X, y=CLASSES), loss=loss)


def low_rank() -> Task:
    return supervised("adapters", adapted, clients(x=X, y=CLASSES))


def weighted() -> Task:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))
    return supervised("weighted", lambda: nn.Linear(4, 3), clients(x=X, y=CLASSES), loss=loss)


CASES: list[tuple[Callable[[], Task], bool, str]] = [
    (tagging, False, "batched (vmap, not padded)"),
    (whole_sentences, True, "batched (layers)"),
    (next_token, False, "batched (vmap, not padded)"),
    (multi_label, True, "batched (layers)"),
    (regression, True, "batched (layers)"),
    (with_dataclass, True, "batched (layers)"),
    (low_rank, True, "batched (layers)"),
    (weighted, False, "batched (vmap, not padded)"),
]
TASKS = pytest.mark.parametrize(
    ("make", "per_example", "batched"), CASES, ids=[case[0].__name__ for case in CASES]
)


@TASKS
def test_every_engine_agrees_with_the_loop(
    make: Callable[[], Task], per_example: bool, batched: str
) -> None:
    task = quiet(make)
    assert isinstance(task.objective, ModuleObjective)
    assert task.objective.per_example == per_example
    run = partial(fx.simulate, task, ALGORITHM, rounds=2, local=LOCAL)
    loop = list(run(engine="loop"))[-1]
    names: dict[EngineName, str] = {"batched": batched, "threads": "threads"}
    for engine, name in names.items():
        other = list(run(engine=engine))[-1]
        assert other.engine == name
        torch.testing.assert_close(other.state.params, loop.state.params, rtol=1e-4, atol=1e-5)
        assert other.train_loss == pytest.approx(loop.train_loss, rel=1e-4)


def reference_loss(task: Task, loss: Callable[[Any, Any], Tensor]) -> float:
    """Return F of the initial model by torch alone: the mean over clients of a client's loss."""
    objective = task.objective
    assert isinstance(objective, ModuleObjective)
    module, values = objective.initial_module(0).eval(), []
    for client in range(task.train.clients):
        batch = task.train.client(client)
        args, keywords = objective.fields.arguments(batch)
        with torch.no_grad():
            value = loss(module(*args, **keywords), objective.fields.targets(batch))
        values.append(value.mean().item())
    return float(np.mean(values))


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (tagging, F.cross_entropy),
        (next_token, next_token_loss),
        (multi_label, F.binary_cross_entropy_with_logits),
        (regression, gaussian),
        (weighted, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))),
    ],
)
def test_the_training_loss_is_the_mean_of_torchs_own_over_clients(
    make: Callable[[], Task], loss: Callable[[Any, Any], Tensor]
) -> None:
    task = quiet(make)
    found = task.evaluate(*task.objective.initial(0))["train_loss"]
    assert found == pytest.approx(reference_loss(task, loss), rel=1e-5)


@pytest.mark.parametrize("make", [tagging, weighted])
def test_a_loss_of_a_batch_has_torchs_own_gradient(make: Callable[[], Task]) -> None:
    task = quiet(make)
    objective = task.objective
    assert isinstance(objective, ModuleObjective)
    params, buffers = objective.initial(0)
    batch = task.train.client(0)
    grad, _ = objective.gradient(params.clone(), buffers, batch)
    module = objective.load(params, buffers)
    loss = F.cross_entropy if make is tagging else nn.CrossEntropyLoss(torch.tensor([1.0, 2, 5]))
    loss(module(*objective.fields.arguments(batch)[0]), batch["y"]).backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(grad, expected)


def test_accuracy_per_token_leaves_padding_out() -> None:
    task = quiet(tagging)
    objective = task.objective
    assert isinstance(objective, ModuleObjective)
    params, buffers = objective.initial(0)
    each = []
    for client in range(CLIENTS):
        batch = task.train.client(client)
        scores = objective.load(params, buffers).eval()(batch["tokens"], batch["mask"])
        counted = batch["y"] != -100
        each.append((scores.argmax(1) == batch["y"])[counted].double().mean().item())
    assert task.evaluate(params, buffers)["train_accuracy"] == pytest.approx(np.mean(each))
    assert task.metric == "train_accuracy"


def test_a_batch_loss_is_evaluated_alike_for_every_number_of_processes() -> None:
    task = quiet(tagging)
    start = task.objective.initial(0)
    whole = task.evaluate(*start)
    for parts in (2, 3, 11):
        first, *others = (task.totals(*start, (part, parts)) for part in range(parts))
        assert task.finish(sum(others, first)) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "engine"), [(tagging, "batched (vmap, not padded)"), (next_token, "loop")]
)
def test_sequence_models_are_batched_on_a_cpu_where_that_is_faster(
    make: Callable[[], Task], engine: str
) -> None:
    local = replace(LOCAL, batch_size=1)  # equally long batches, since those of attention vary
    record = next(fx.simulate(quiet(make), ALGORITHM, rounds=1, local=local))
    assert record.engine == engine


def test_default_losses_are_those_of_classification() -> None:
    train = clients(x=X, y=CLASSES)
    build = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))  # noqa: E731
    tasks = [
        classification("a", build, train),
        supervised("a", build, train),
        supervised("a", build, train, loss=nn.CrossEntropyLoss()),
    ]
    ends = [list(fx.simulate(task, ALGORITHM, rounds=2))[-1] for task in tasks]
    for task, end in zip(tasks, ends, strict=True):
        assert end.engine == "dense"
        assert torch.equal(end.state.params, ends[0].state.params)
        assert end.train_accuracy == ends[0].train_accuracy
        assert task.metric == "train_accuracy"
        assert isinstance(task.objective, ModuleObjective)
        assert type(task.objective.loss) is nn.CrossEntropyLoss


def test_batch_statistics_in_an_evaluation_get_a_note() -> None:
    def build(tracked: bool) -> nn.Module:
        norm = nn.BatchNorm1d(4, track_running_stats=tracked)
        return nn.Sequential(norm, nn.Linear(4, 3))

    train = clients(x=X, y=CLASSES)
    with pytest.warns(DataNote, match="BatchNorm without running statistics .*=True$"):
        classification("mine", partial(build, False), train)
    classification("mine", partial(build, True), train)


def test_data_are_cast_with_one_note_each() -> None:
    x, y = X.astype(np.float64), CLASSES.astype(np.int16)
    with pytest.warns(DataNote) as notes:
        task = supervised(
            "mine", lambda: nn.Linear(4, 3), clients(x=x, y=y), test={"x": x.tolist(), "y": y}
        )
    assert [str(note.message) for note in notes] == [
        "task 'mine': inputs 'x' are cast from float64 to float32, the type of the model",
        "task 'mine': labels 'y' are cast from int16 to int64",
    ]
    assert notes[0].filename == __file__
    assert task.test is not None
    for fields in (task.train.fields, task.test):
        assert (fields["x"].dtype, fields["y"].dtype) == (torch.float32, torch.int64)
    with pytest.warns(DataNote, match="labels 'y' are cast from int64 to float32"):
        supervised("b", lambda: nn.Linear(4, 2), clients(x=X, y=TOKENS[:, :2]), loss=F.mse_loss)


def test_a_loss_that_cannot_be_used_per_example_gets_a_note() -> None:
    with pytest.warns(DataNote, match="some targets are ignored"):
        tagging()
    with pytest.warns(DataNote, match="classes have weights"):
        weighted()

    def root(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        squares = (outputs - targets).square().flatten(1)
        return squares.mean(1) if reduction == "none" else squares.mean().sqrt()

    with pytest.warns(
        DataNote, match="averages in its own way.*512 examples is reported as a mean"
    ):
        task = supervised("c", lambda: nn.Linear(4, 4), clients(x=X, y=X), loss=root)
    assert isinstance(task.objective, ModuleObjective)
    assert not task.objective.per_example


@pytest.mark.parametrize(
    ("loss", "per_example"),
    [
        (F.mse_loss, True),
        (nn.MSELoss(), True),
        (nn.MSELoss(reduction="none"), True),
        (F.huber_loss, True),
        (partial(F.huber_loss, delta=0.5), True),
        (lambda out, y: F.mse_loss(out, y), False),
        (lambda out, y: (out - y).square().mean(1), True),
    ],
)
def test_losses_are_used_per_example_where_they_can_be(loss: Any, per_example: bool) -> None:
    task = supervised("mine", lambda: nn.Linear(4, 4), clients(x=X, y=X), loss=loss)
    assert isinstance(task.objective, ModuleObjective)
    assert task.objective.per_example == per_example
    assert task.metric == "train_loss"
    assert list(fx.simulate(task, ALGORITHM, rounds=1))[-1].train_loss is not None


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


def column(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(4, width)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": F.mse_loss, "model": column(1), "label": "z"}, r"one shape, e.g. output.squeeze"),
        (
            {"loss": lambda o, y: F.mse_loss(o, y), "model": column(1), "label": "z"},
            "compare each with each.*output.squeeze",
        ),
        (
            {"loss": nn.BCEWithLogitsLoss(), "model": column(1), "label": "y"},
            "the loss does not accept .*; give them one shape, e.g. output.squeeze",
        ),
        ({"loss": F.mse_loss, "model": flat, "label": "w"}, r"one shape, e.g. y\[:, 0\]$"),
        (
            {"loss": lambda o, y: ((o - y) ** 2).mean(), "model": flat, "label": "w"},
            r"compares each with each; give them one shape, e.g. y\[:, 0\]$",
        ),
        (
            {"loss": lambda o, y: (o - y) ** 2, "model": flat, "label": "w"},
            r"has the shape .2, 2.; give outputs and labels one shape, e.g. y\[:, 0\]$",
        ),
        ({"loss": F.mse_loss, "label": "z"}, r"compare each with each; give them one shape$"),
        ({"loss": nn.MSELoss(reduction="sum"), "label": "x"}, 'use reduction="mean"'),
        (
            {"loss": lambda o, y: F.cross_entropy(o, y, reduction="sum")},
            "the loss sums over a batch; return its mean",
        ),
        (
            {"loss": lambda o, y: F.cross_entropy(o, y, reduction="none") / y.float().std()},
            "the loss of an example depends on the other examples of its batch; return one number",
        ),
        ({"loss": "mse"}, "the loss is str, not a function"),
        ({"loss": lambda o, y: 1.0}, "the loss returns float; return a tensor"),
        ({"loss": lambda o, y: o.sum(0)}, "has the shape .3.; return a value for each example"),
        (
            {"loss": lambda o, y: o @ y},
            "the loss does not accept float32 of shape .2, 3. and int64 of shape .2.",
        ),
        ({"model": column(2)}, "labels go from 0 to 2, but the model has the classes 0 to 1"),
        (
            {"model": nn.Linear(5, 3)},
            r"does not accept these training examples \(x float32 of shape .2, 4.\): mat1",
        ),
        ({"model": WithDataclass}, "returns Output, not class scores; give a loss that takes it"),
        ({"inputs": ("x", "mask")}, "the training data has no field mask"),
        ({"inputs": ()}, "inputs names no field"),
        ({"inputs": 3}, "inputs is 3; name the fields"),
        ({"label": None}, "label is None; name the fields"),
        ({"label": "target"}, "has no field target; name its fields so, or pass inputs and label"),
        ({"goal": "max:test_f1"}, "unknown record field 'test_f1'; "),
        ({"goal": "min:trian_loss"}, "unknown record field 'trian_loss'; did you mean train_loss"),
        ({"goal": "f1"}, "write max:f1 or min:f1"),
        ({"goal": "up:train_loss"}, "write max:test_f1 or min:test_loss"),
        ({"metrics": {"accuracy": len}}, "accuracy is measured without asking"),
        ({"metrics": {"loss": len}}, "a metric cannot be called 'loss'"),
        ({"metrics": {"loss_worst_decile": len}}, "by_client gives .* end in _worst_decile; take"),
        ({"metrics": {"f1": 3}}, "metric 'f1' is int; give a function of"),
        ({"train_metrics": "all"}, "train_metrics is clients, pooled or None"),
        ({"train": {"x": X, "y": CLASSES}}, "train is dict, not a Federation; make one with"),
        ({"test": (X, CLASSES)}, "test is tuple; give its fields by name"),
        ({"name": 3}, "the name of a task is text, not 3"),
        ({"test": {"x": X * np.nan, "y": CLASSES}}, "field 'x' of the test data holds values"),
        ({"test": {"x": X[:1], "y": ["cat"]}}, r"convert text by numpy.unique"),
        ({"local": {"lr": 0.1}}, "local is dict; give fedexp.LocalTraining"),
        ({"metrics": [len]}, "metrics is list; give metrics by name"),
        ({"metrics": {"size": nn.Linear}}, "metric 'size' is the class Linear; call it"),
        ({"target": "0.9"}, "target is '0.9'; give a number"),
        ({"model": nn.Linear}, "cannot be built without arguments: .*; pass a function, e.g."),
        ({"model": lambda: None}, "returns NoneType, not an nn.Module"),
        ({"model": "resnet"}, "the model is str; pass a function that builds it"),
        ({"loss": nn.CrossEntropyLoss}, "the loss is the class CrossEntropyLoss; call it"),
        ({"loss": lambda o, y: 1 / 0}, "the loss does not accept .*: division by zero"),
        ({"loss": lambda o, y: F.cross_entropy(o.detach(), y)}, "the loss has no gradient; "),
        ({"train": clients(x=X, y=CLASSES[:, None])}, r"one class number per example.*y\[:, 0\]"),
        (
            {"label": "z"},
            r"convert class numbers to integers, e.g. y.astype\(int\), or pass loss=F",
        ),
        (
            {"test": {"x": X[:, :3], "y": CLASSES}},
            r"these test examples \(x float32 of shape .2, 3",
        ),
        (
            {"test": {"x": X, "y": CLASSES > 0}},
            r"test data: the loss does not accept .* bool of shape .2..*training data are int64",
        ),
        ({"test": {"x": X.astype(int), "y": CLASSES}}, "convert x to float32"),
        ({"train": clients(x=X.astype(int), y=CLASSES)}, "convert x to float32"),
        ({"train": clients(x=LARGE, y=CLASSES)}, "values of 'x' exceed the range of float32"),
        ({"test": {"x": LARGE, "y": CLASSES}}, "values of 'x' exceed the range of float32"),
        (
            {
                "train": clients(x=X, y=np.float32(255) * (CLASSES[:, None] > 0)),
                "model": column(1),
                "loss": F.binary_cross_entropy_with_logits,
            },
            "targets y of the training data are 0 to 255, those of a binary cross entropy 0 to 1",
        ),
        (
            {
                "train": clients(x=X, y=np.float32(1) * (CLASSES[:, None] > 0)),
                "model": column(1),
                "test": {"x": X, "y": 1 - CLASSES[:, None].astype(np.float32)},
                "loss": nn.BCEWithLogitsLoss(),
            },
            "targets y of the test data are -1 to 1",
        ),
    ],
)
def test_mistakes_get_one_line_when_the_task_is_made(
    arguments: dict[str, Any], message: str
) -> None:
    train = clients(x=X, y=CLASSES, z=X[:, 0], w=X[:, :1])
    settings = {"name": "mine", "model": column(3), "train": train, **arguments}
    with pytest.raises(UsageError, match=message) as caught:
        supervised(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("broken", ["train", "test"])
def test_an_index_that_an_embedding_has_not_is_refused(broken: str) -> None:
    model = lambda: nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.Linear(4 * LENGTH, 3))  # noqa: E731
    tokens = {name: TOKENS.copy() for name in ("train", "test")}
    tokens[broken][20] = WORDS
    test = {"x": tokens["test"], "y": CLASSES}
    task = supervised("mine", model, clients(x=tokens["train"], y=CLASSES), test, local=LOCAL)
    with pytest.raises(UsageError, match=r"no entry for an index .* x 0 to 11 .*num_embeddings"):
        list(fx.simulate(task, fx.fedavg(), rounds=1))


def test_parameters_in_half_precision_get_a_note() -> None:
    half = clients(x=torch.from_numpy(X).bfloat16(), y=CLASSES)
    with pytest.warns(DataNote, match="small updates are lost; build the model in float32"):
        supervised("mine", lambda: nn.Linear(4, 3).bfloat16(), half)


def test_a_loss_of_a_batch_that_compares_each_with_each_is_refused() -> None:
    train = clients(x=X, y=X[:, 0])

    def squares(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) ** 2).mean()

    with pytest.raises(UsageError, match=r"outputs \[2, 1\] and labels \[2\] differ in shape, and"):
        supervised("mine", column(1), train, loss=squares)
    task = supervised("mine", column(1), train, loss=lambda o, y: squares(o.squeeze(1), y))
    flat = supervised(
        "mine", lambda: nn.Sequential(column(1)(), nn.Flatten(0)), train, loss=squares
    )
    for each in (task, flat):
        assert isinstance(each.objective, ModuleObjective)
        assert not each.objective.per_example


@pytest.mark.parametrize("label", ["z", "n", "b"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: ((o - y.float()) ** 2).mean(),
        lambda o, y: ((o - y.float()) ** 2).mean(dim=1),
        lambda o, y: ((o - y.float()) ** 2).mean(dim=0),
    ],
)
def test_losses_that_compare_each_with_each_are_refused(label: str, loss: Any) -> None:
    train = clients(x=X, z=X[:, 0], n=np.round(3 * X[:, 0]).astype(int), b=X[:, 0] > 0)
    with pytest.raises(UsageError, match=r"compares each with each; .* e.g. output.squeeze\(1\)$"):
        supervised("mine", column(1), train, loss=loss, label=label)
    inside = lambda o, y: loss(o, y[:, None])  # noqa: E731
    if loss(torch.zeros(3, 1), torch.zeros(3, 1)).shape != (1,):
        supervised("mine", column(1), train, loss=inside, label=label)


def test_a_loss_in_a_dict_that_compares_each_with_each_is_refused() -> None:
    train = clients(a=X, b=X[:, :2], y=np.sort(CLASSES), w=np.ones(ROWS, np.float32))
    pair = lambda o, y: ((o["mean"][:, None] - y) ** 2).mean(1)  # noqa: E731
    with pytest.raises(UsageError, match="depends on the other examples of its batch; return one"):
        supervised("mine", Pair, train, loss=pair, inputs={"a": "a", "b": "b"})


def similarity(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the contrastive loss of a batch whose examples are their own classes."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss of pairs of examples: those of one class are close, others are not."""
    distances = (outputs[:, None] - outputs[None]).square().sum(2)
    alike = (targets[:, None] == targets[None]).float()
    return (alike * distances + (1 - alike) * torch.exp(-distances)).mean()


def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs + torch.randn_like(outputs), targets, reduction="none")


@pytest.mark.parametrize(
    ("loss", "width", "label", "per_example"),
    [
        (similarity, 3, "y", False),
        (by_class, 3, "y", False),
        (noisy, 3, "y", True),
        (lambda o, y: noisy(o, y).mean(), 3, "y", False),
        (lambda o, y: F.cross_entropy(o, y, reduction="none"), 3, "y", True),
        (lambda o, y: F.cross_entropy(o, y, torch.tensor([1.0, 2, 5])), 3, "y", False),
        (lambda o, y: F.cross_entropy(o, y, ignore_index=1), 3, "y", False),
        (lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()), 1, "b", False),
        (lambda o, y: F.binary_cross_entropy_with_logits(o, y.float()), 1, "c", False),
        (nn.BCEWithLogitsLoss(), 1, "c", True),
        (lambda o, y: (o.mean() - y.mean()) ** 2, 1, "z", False),
        (lambda o, y: ((o[:, 0] - y) ** 2).sum() / len(y), 1, "z", False),
        (lambda o, y: (o[:, 0] - y).abs(), 1, "z", True),
    ],
)
def test_losses_that_pair_outputs_with_their_targets_are_accepted(
    loss: Any, width: int, label: str, per_example: bool
) -> None:
    train = clients(x=X, y=CLASSES, z=X[:, 0], b=X[:, 0] > 0, c=X[:, :1] > 0)
    task = quiet(lambda: supervised("mine", column(width), train, loss=loss, label=label))
    assert isinstance(task.objective, ModuleObjective)
    assert task.objective.per_example == per_example


def test_scores_of_tokens_with_classes_last_get_the_remedy() -> None:
    model = lambda: nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))  # noqa: E731
    with pytest.raises(
        UsageError, match=r"class scores of shape \[examples, classes, 6\], .*transpose"
    ):
        supervised("mine", model, clients(x=TOKENS, y=TOKENS))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="none"),
        partial(F.cross_entropy, reduction="none"),
        partial(F.cross_entropy, ignore_index=-100),
    ],
)
def test_ignored_targets_count_nothing_whatever_the_reduction(loss: Any) -> None:
    train = clients(tokens=TOKENS, mask=PADDING, y=NEXT)
    with pytest.warns(DataNote, match="some targets are ignored"):
        task = supervised("tags", Tagger, train, loss=loss, inputs=("tokens", "mask"))
    same = quiet(tagging)
    start = same.objective.initial(0)
    assert task.evaluate(*start) == same.evaluate(*start)


def test_single_labels_may_be_ignored() -> None:
    labels = CLASSES.clone() if isinstance(CLASSES, torch.Tensor) else torch.tensor(CLASSES)
    labels[::5] = -100
    with pytest.warns(DataNote, match="some targets are ignored"):
        task = supervised("some", column(3), clients(x=X, y=labels))
    values = task.evaluate_clients(*task.objective.initial(0))
    ends = task.train.offsets.tolist()
    outputs, _ = task.objective.predict(  # type: ignore[attr-defined]
        *task.objective.initial(0), task.train.fields
    )
    y = task.train.fields["y"]
    for client in range(task.train.clients):
        own = slice(ends[client], ends[client + 1])
        expected = F.cross_entropy(outputs[own], y[own])
        assert values["train_loss"][client].item() == pytest.approx(expected.item(), rel=1e-5)


MANY, PER_TOKEN = 1300, 4  # rows: more than are evaluated together


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (F.cross_entropy, -100),
        (nn.CrossEntropyLoss(ignore_index=7), 7),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0, 0.5])), None),
        (nn.NLLLoss(weight=torch.tensor([1.0, 20.0, 0.5]), ignore_index=-1), -1),
        (
            partial(F.cross_entropy, weight=torch.tensor([1.0, 20.0, 0.1]), label_smoothing=0.1),
            -100,
        ),
    ],
)
@pytest.mark.parametrize("per_token", [False, True])
def test_an_evaluation_is_torchs_own_whatever_the_order_of_rows(
    loss: Any, ignored: int | None, per_token: bool
) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.layer(x).log_softmax(-1)
            return scores.movedim(-1, 1)

    rng = np.random.default_rng(1)
    shape = (MANY, PER_TOKEN) if per_token else (MANY,)
    x, y = rng.normal(size=(*shape, 4)).astype(np.float32), rng.integers(0, 3, shape)
    y = y[np.argsort(y.reshape(MANY, -1)[:, 0])]  # pieces have classes of their own
    if ignored is not None:
        y[900:1200] = ignored
    ids = np.repeat([0, 1, 2], [100, 1150, 50])
    train = Federation.from_ids({"x": x, "y": y}, ids)
    with pytest.warns(DataNote, match="the loss is used as the mean over a batch"):
        task = supervised("mine", Scores, train, train, loss=loss, by_client=True)
    start = task.objective.initial(0)
    values, by_client = task.evaluate(*start), task.evaluate_clients(*start)
    assert isinstance(task.objective, ModuleObjective)
    model = task.objective.load(*start).eval()

    def expected(rows: Any) -> tuple[float, float]:
        outputs, targets = model(torch.from_numpy(x[rows])), torch.from_numpy(y[rows])
        right, counted = (outputs.argmax(1) == targets), targets != ignored
        return loss(outputs, targets).item(), right[counted].double().mean().item()

    pooled = values["test_loss"], values["test_accuracy"]
    assert pooled == pytest.approx(expected(slice(None)), rel=1e-5)
    each = [expected(ids == client) for client in range(3)]
    for split in ("train", "test"):
        found = zip(by_client[f"{split}_loss"], by_client[f"{split}_accuracy"], strict=True)
        for own, other in zip(found, each, strict=True):
            assert tuple(map(float, own)) == pytest.approx(other, rel=1e-5)
    means = values["train_loss"], values["train_accuracy"]
    assert means == pytest.approx(tuple(np.mean(each, axis=0)), rel=1e-5)
    halves = [task.totals(*start, (part, 2)) for part in range(2)]
    assert task.finish(halves[0] + halves[1]) == pytest.approx(values, rel=1e-12)
    for client in range(3):
        own_loss = client_loss(task, client, task.objective, *start)
        assert own_loss.item() == pytest.approx(each[client][0], rel=1e-5)


@pytest.mark.parametrize("as_function", [False, True])
def test_the_tensors_of_a_loss_follow_the_model(as_function: bool) -> None:
    weight = torch.tensor([1.0, 2.0, 5.0])
    loss: Any = nn.CrossEntropyLoss(weight)
    if as_function:
        loss = partial(F.cross_entropy, weight=weight)
    train = clients(x=X, y=CLASSES)
    task = quiet(lambda: supervised("w", column(3), train, loss=loss))
    assert isinstance(task.objective, ModuleObjective)
    wide: Any = task.objective.copy(torch.float64).loss
    moved: Any = task.objective.on(torch.device("meta"), "float32").loss
    tensors = [each.keywords["weight"] if as_function else each.weight for each in (wide, moved)]
    assert tensors[0].dtype == torch.float64
    assert tensors[1].device.type == "meta"
    assert weight.dtype == torch.float32


def test_a_client_without_a_counted_target_is_refused() -> None:
    y = np.where(IDS[:, None] == 2, -100, NEXT)
    with pytest.raises(UsageError, match="no example of client 2 counts: all its targets"):
        supervised(
            "mine", Tagger, clients(tokens=TOKENS, mask=PADDING, y=y), inputs=("tokens", "mask")
        )


def test_adapters_send_only_what_they_train() -> None:
    task = low_rank()
    trained = 2 * (4 + 16) + 2 * (16 + 3)
    record = list(fx.simulate(task, ALGORITHM, rounds=2, local=LOCAL))[-1]
    assert record.engine == "batched (layers)"
    assert record.state.params.numel() == trained
    model, objective = record.model(), task.objective
    assert isinstance(objective, ModuleObjective)
    start = objective.load(*objective.initial(0)).state_dict()
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, start[n])}
    assert changed == {f"{layer}.{name}.weight" for layer in "02" for name in ("down", "up")}


def test_fields_may_have_any_name_in_every_engine() -> None:
    named = supervised(
        "a", column(3), clients(features=X, kind=CLASSES), inputs="features", label="kind"
    )
    plain = supervised("a", column(3), clients(x=X, y=CLASSES))
    engines: tuple[EngineName, ...] = ("loop", "batched", "auto")
    for engine in engines:
        a, b = (
            list(fx.simulate(t, ALGORITHM, rounds=2, engine=engine))[-1] for t in (named, plain)
        )
        assert a.engine == b.engine
        assert torch.equal(a.state.params, b.state.params)


def test_a_test_federation_is_pooled_and_evaluated_by_client() -> None:
    train = clients(x=X, y=CLASSES)
    held_out = Federation.from_ids({"x": X[::2], "y": CLASSES[::2]}, IDS[::2])
    task = supervised("mine", column(3), train, test=held_out, by_client=True)
    pooled = supervised("mine", column(3), train, test=dict(held_out.fields))
    record = list(fx.simulate(task, ALGORITHM, rounds=1))[-1]
    other = list(fx.simulate(pooled, ALGORITHM, rounds=1))[-1]
    assert (record.test_loss, record.test_accuracy) == (other.test_loss, other.test_accuracy)
    by_client = record.evaluate_clients()
    model = record.model()
    for split, data in (("train", train), ("test", held_out)):
        for client in range(CLIENTS):
            batch = data.client(client)
            scores = model(batch["x"])
            right = (scores.argmax(1) == batch["y"]).double().mean().item()
            loss = F.cross_entropy(scores, batch["y"]).item()
            assert by_client[f"{split}_accuracy"][client] == pytest.approx(right)
            assert by_client[f"{split}_loss"][client] == pytest.approx(loss, rel=1e-5)
        worst = record.metrics[f"{split}_accuracy_worst_decile"]
        assert worst == pytest.approx(by_client[f"{split}_accuracy"].min())
        highest = record.metrics[f"{split}_loss_worst_decile"]
        assert highest == pytest.approx(by_client[f"{split}_loss"].max())
    assert by_client["train_loss"].mean() == pytest.approx(record.train_loss)
    few = Federation.from_parts({"x": X, "y": CLASSES}, [np.arange(ROWS)])
    with pytest.raises(UsageError, match="the test data has 1 clients, the training data 5"):
        supervised("mine", column(3), train, test=few)


def test_a_record_gives_the_output_model() -> None:
    task = supervised("mine", column(3), clients(x=X, y=CLASSES))
    record = list(fx.simulate(task, ALGORITHM, rounds=3))[-1]
    model = record.model()
    assert not model.training
    loss = task.evaluate(*record.state.output())["train_loss"]
    assert record.train_loss == loss
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(flat, record.state.output()[0])
    least = list(fx.simulate(fx.tasks.toy(), ALGORITHM, rounds=1))[-1]
    with pytest.raises(UsageError, match="no torch module for this objective"):
        least.model()


def test_nothing_prints_its_data() -> None:
    task = supervised("mine", column(3), clients(x=X, y=CLASSES), test={"x": X, "y": CLASSES})
    record = list(fx.simulate(task, ALGORITHM, rounds=1))[-1]
    assert repr(task) == "Task('mine': 5 clients, 60 examples, 60 test examples, test_accuracy)"
    assert repr(task.train) == "Federation(5 clients, 60 examples: x float32 [4], y int64 [])"
    assert repr(record.state) == "SimulationState(round 1, 15 parameters)"
    assert repr(record).startswith("Record(round 1, server_lr ")
    assert all(len(repr(each).splitlines()) == 1 for each in (task, task.train, record))


def test_a_loss_that_squeezes_is_accepted_and_records_its_calls_alone() -> None:
    x, y = torch.randn(8, 3), torch.randn(8)
    calls = []

    class Squeezing:
        def __init__(self) -> None:
            self.calls: list[int] = []

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls.append(len(targets))
            calls.append(len(targets))
            return nn.functional.mse_loss(outputs.squeeze(), targets.squeeze(), reduction="none")

    train = fx.Federation.from_ids({"x": x, "y": y}, np.arange(8) // 4)
    own = Squeezing()
    task = fx.supervised("own", lambda: nn.Linear(3, 1), train, loss=own, target=-1.0)
    assert isinstance(task.objective, ModuleObjective)
    assert task.objective.per_example
    assert task.target == -1.0
    assert len(own.calls) < len(calls)  # checks are made on copies
