"""`classification`: a task from a model and data, and the errors for unusable ones; `counted`."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedexp as fx
from fedexp.data import partition
from fedexp.data.federation import Batch, Federation
from fedexp.errors import UsageError
from fedexp.objective import ModuleObjective
from fedexp.tasks.supervised import classification, supervised
from fedexp.tasks.task import Task


def test_your_own_data_in_five_lines() -> None:
    x, y = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32), np.arange(90) % 3
    parts = partition.dirichlet_unequal(y, clients=5, alpha=0.5, rng=np.random.default_rng(0))
    mine = Federation.from_parts({"x": x, "y": y}, parts)
    task = classification("mine", lambda: nn.Linear(4, 3), mine)
    records = list(fx.simulate(task, fx.fedexp(), rounds=2))
    assert records[-1].train_accuracy is not None
    assert records[-1].test_accuracy is None
    assert task.metric == "train_accuracy"


def federation(x: Any, y: Any) -> Federation:
    return Federation.from_parts({"x": torch.as_tensor(x), "y": torch.as_tensor(y)}, [np.arange(2)])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([0.0, 1.0], "float32 of shape .2., not int64 class numbers"),
        ([True, False], "bool of shape"),
        ([[1, 0], [0, 1]], "int64 of shape .2, 2.*one per example"),
        ([1, 3], "go from 1 to 3, but the model has the classes 0 to 2.*4 classes"),
        ([-1, 0], "number the labels from 0"),
    ],
)
def test_labels_that_are_not_class_numbers_are_refused(y: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        classification("mine", lambda: nn.Linear(4, 3), federation(torch.zeros(2, 4), y))


def test_test_data_are_checked_as_well() -> None:
    train = federation(torch.zeros(2, 4), [0, 1])
    for test, message in (
        ({"x": torch.zeros(2, 4), "y": torch.tensor([0, 7])}, "test labels go from 0 to 7"),
        ({"x": torch.zeros(2, 4)}, "the test data has no field y"),
        ({"x": torch.zeros(0, 4), "y": torch.zeros(0, dtype=torch.int64)}, "no examples"),
        (
            {"x": torch.zeros(3, 4), "y": torch.tensor([0, 1])},
            "test data: .* 'x' has 3 rows, 'y' has 2",
        ),
        ({"mean": torch.zeros(4), **train.fields}, "'mean' has 4 rows, .*; leave out"),
        ({"scale": torch.tensor(2.0), **train.fields}, "test data: field 'scale' is a single"),
    ):
        with pytest.raises(UsageError, match=message):
            classification("mine", lambda: nn.Linear(4, 3), train, test)


def test_bytes_without_a_transform_are_refused() -> None:
    train = federation(torch.zeros(2, 4, dtype=torch.uint8), [0, 1])
    with pytest.raises(UsageError, match="pass transform=Images"):
        classification("mine", lambda: nn.Linear(4, 3), train)


def test_a_model_without_class_scores_is_refused() -> None:
    train = federation(torch.zeros(2, 4), [0, 1])
    with pytest.raises(
        UsageError, match=r"shape \[examples, classes\], not float32 of shape \[1, 1, 4\]"
    ):
        classification(
            "mine", lambda: nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (1, 4))), train
        )


def test_a_task_can_be_pickled_after_an_evaluation() -> None:
    train = federation(torch.randn(2, 4), [0, 1])
    task = classification("mine", nn.Linear(4, 3), train, train.fields)
    initial = task.objective.initial(0)
    values = task.evaluate(*initial)
    assert pickle.loads(pickle.dumps(task)).evaluate(*initial) == values


PAD, PADDED = 0, nn.CrossEntropyLoss(ignore_index=0, reduction="none")
Counted = Callable[[Batch], torch.Tensor]


def counted_part(batch: Batch) -> torch.Tensor:
    return (batch["y"] != PAD).float().mean(dim=1)


def padded_task(by_batch: bool = False, counted: Counted = counted_part) -> Task:
    """Return a task of tokens, a third of which is padding, as docs/tasks.md describes it."""
    x = torch.arange(24).reshape(4, 6) % 6 + 1
    y = x.clone()
    y[:, 4:] = PAD
    train = Federation({"x": x, "y": y}, np.array([0, 1, 4]))
    build = lambda: nn.Sequential(nn.Embedding(7, 7), Channels())  # noqa: E731
    if by_batch:
        with pytest.warns(match="some targets are ignored"):
            task = supervised("mine", build, train, train, loss=PADDED)
    else:
        task = supervised("mine", build, train, train)
        assert isinstance(task.objective, ModuleObjective)
        own = task.objective.with_loss(PADDED, classifies=True, ignore_index=PAD)
        task = replace(task, objective=own)
    return replace(task, counted=counted)


class Channels(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


def test_evaluations_divide_by_what_counts() -> None:
    task = padded_task()
    params, buffers = task.objective.initial(0)
    table = params.view(7, 7)
    x, y = (task.train.fields[name] for name in ("x", "y"))
    real = y != PAD
    expected = nn.functional.cross_entropy(table[x[real]], y[real])
    assert task.evaluate(params, buffers)["test_loss"] == pytest.approx(expected.item())


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`counted` needs a loss per example.*with_loss"):
        padded_task(by_batch=True)
    mistakes: dict[str, Counted] = {
        r"shape \[4, 6\], not \[4\]: return one": lambda batch: (batch["y"] != PAD).float(),
        "no example of client 0 counts": lambda batch: torch.tensor([0.0, 1, 1, 1]),
    }
    for message, counted in mistakes.items():
        task = padded_task(counted=counted)
        with pytest.raises(UsageError, match=message):
            task.evaluate(*task.objective.initial(0))


def convolutions() -> nn.Module:
    """Build convolutions, a norm with buffers, a frozen layer and a layer in two places."""
    shared = nn.Conv2d(3, 3, 3, padding=1)
    frozen = nn.Conv2d(3, 3, 1).requires_grad_(False)
    head = (nn.Flatten(), nn.Linear(48, 3))
    return nn.Sequential(nn.Conv2d(2, 3, 3, 1, 1), nn.BatchNorm2d(3), shared, frozen, shared, *head)


def pictures() -> Task:
    x = torch.randn(12, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    train = Federation({"x": x, "y": torch.arange(12) % 3}, np.array([0, 5, 12]))
    return classification("pictures", convolutions, train)


def test_the_model_of_a_record_is_contiguous_like_that_of_a_run() -> None:
    *_, record = fx.simulate(pictures(), "fedexp", rounds=2, seed=0)
    model = record.model()
    stored = fx.run(pictures(), "fedexp", rounds=2, seed=0, runs=None).model()
    for one, other in zip(model.parameters(), stored.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    torch.nn.utils.parameters_to_vector(model.parameters())
    assert isinstance(model, nn.Sequential)
    assert model[2] is model[4]


def test_a_vector_becomes_a_state_dict_and_back() -> None:
    task = pictures()
    *_, record = fx.simulate(task, "fedexp", rounds=2, seed=0)
    model, (params, _) = record.model(), record.state.output()
    weights = task.to_state_dict(params)
    assert weights.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, value in weights.items():
        assert value.is_contiguous()
        assert torch.equal(value, model.get_parameter(name))
    assert torch.equal(task.to_vector(weights), params)
    assert torch.equal(task.to_vector(model.state_dict()), params)
    assert torch.equal(task.to_vector({n: v.numpy() for n, v in weights.items()}), params)
    wide = {name: value.double() for name, value in weights.items()}
    assert torch.equal(task.to_vector(wide), params)
    assert task.to_vector(wide).dtype == params.dtype
    weights["0.weight"].zero_()
    assert torch.equal(task.to_vector(model.state_dict()), params)
    net = convolutions()
    assert not net.load_state_dict(task.to_state_dict(params), strict=False).unexpected_keys
    assert torch.equal(task.to_vector(net.state_dict()), params)


def test_named_views_are_parts_of_their_vector() -> None:
    task = pictures()
    params, _ = task.objective.initial(0)
    views = task.named_views(params)
    assert views.keys() == task.to_state_dict(params).keys()
    views["0.weight"].fill_(7.0)
    assert (params == 7.0).sum() == views["0.weight"].numel() == 54
    assert (task.to_state_dict(params)["0.weight"] == 7.0).all()
    rows = torch.stack([params, 2 * params])
    assert torch.equal(task.named_views(rows)["6.bias"][1], 2 * views["6.bias"])


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda task, w: task.to_vector({"0.wieght": w["0.weight"]}), "did you mean 0.weight"),
        (lambda task, w: task.to_vector({"0.bias": w["0.bias"]}), "has no 0.weight; give all"),
        (lambda task, w: task.to_vector({**w, "0.weight": w["0.bias"]}), "shape .3., that of task"),
        (lambda task, w: task.to_vector({**w, 3: w["0.bias"]}), "unknown parameter .* '3'"),
        (lambda task, w: task.to_vector({**w, "0.bias": "abc"}), "0.bias does not hold real"),
        (
            lambda task, w: task.to_vector({**w, "0.bias": w["0.bias"] + 0j}),
            "not hold real numbers",
        ),
        (lambda task, w: task.to_vector([*w.values()]), "takes a state_dict, not list"),
        (lambda task, w: task.to_state_dict(torch.zeros(3)), "parameters, but the vector is .3."),
        (lambda task, w: task.named_views(w), "but the vector is dict; give one such as record"),
        (lambda task, w: fx.tasks.toy().to_vector(w), "has no nn.Module"),
    ],
)
def test_other_vectors_and_names_are_refused(use: Any, message: str) -> None:
    task = pictures()
    weights = task.to_state_dict(task.objective.initial(0)[0])
    with pytest.raises(UsageError, match=message) as error:
        use(task, weights)
    assert "\n" not in str(error.value)


def judged(right: list[list[bool]], **settings: Any) -> Task:
    """Build a task whose initial model is right about these examples of these clients."""
    rows = torch.tensor([each for client in right for each in client])
    fields = {"x": torch.stack([rows, ~rows], dim=1).float(), "y": torch.zeros(len(rows)).long()}
    offsets = np.cumsum([0, *map(len, right)])
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    return Task(
        name="judged",
        objective=ModuleObjective(model),
        train=Federation(fields, offsets),
        local=fx.LocalTraining(lr=0.1),
        test=fields,
        test_offsets=offsets,
        **settings,
    )


def in_parts(task: Task, count: int) -> dict[str, float]:
    """Evaluate the initial model as so many processes do."""
    shares = [task.totals(*task.objective.initial(0), (k, count)) for k in range(count)]
    return task.finish(sum(shares[1:], shares[0]))


def outcomes(count: int) -> list[list[bool]]:
    """Draw which examples are right, of clients of equal sizes or not; sometimes all of them."""
    rng = np.random.default_rng(count)
    clients = int(rng.integers(1, 12))
    sizes = rng.integers(1, 90, clients) if count % 2 else [int(rng.integers(1, 200))] * clients
    share = 1.0 if count % 5 == 0 else rng.random()
    return [(rng.random(size) < share).tolist() for size in sizes]


@pytest.mark.parametrize("processes", [1, 3])
def test_an_accuracy_is_correctly_rounded(processes: int) -> None:
    for count in range(40):
        right = outcomes(count)
        values = in_parts(judged(right, by_client=True), processes)
        every = [each for client in right for each in client]
        means = [Fraction(sum(client), len(client)) for client in right]
        assert values["test_accuracy"] == sum(every) / len(every)
        assert values["train_accuracy"] == float(sum(means) / len(means)) <= 1.0


def test_an_accuracy_of_80_of_100_is_0_8() -> None:
    values = in_parts(judged([[k < 80 for k in range(100)]]), 1)
    assert values["test_accuracy"] == values["train_accuracy"] == 0.8


def test_an_accuracy_of_the_examples_that_count_is_correctly_rounded() -> None:
    for count in range(20):
        counts = [[True, *(k % 3 > 0 for k in range(len(client)))] for client in outcomes(count)]
        right = [[c and k % 7 > 0 for k, c in enumerate(client)] for client in counts]
        flat = torch.tensor([each for client in counts for each in client]).double()
        values = in_parts(judged(right, counted=lambda fields, flat=flat: flat), 2)
        means = [Fraction(sum(r), sum(c)) for r, c in zip(right, counts, strict=True)]
        assert values["train_accuracy"] == float(sum(means) / len(means))
        assert values["test_accuracy"] == sum(map(sum, right)) / sum(map(sum, counts))


def test_an_accuracy_of_tokens_is_at_most_1() -> None:
    class Sure(nn.Module):
        """A model that is right about every token."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (nn.functional.one_hot(x, 3) * self.scale).movedim(-1, 1)

    rng = np.random.default_rng(0)
    for tokens in range(2, 12):
        x = rng.integers(0, 3, (30, tokens))
        y = np.where(rng.random(x.shape) < 0.3, -100, x)
        y[:, 0] = x[:, 0]
        train = Federation.from_ids({"x": x, "y": y}, np.arange(30) % 4)
        with pytest.warns(fx.errors.DataNote, match="some targets are ignored"):
            task = supervised("tokens", Sure, train, {"x": x, "y": y}, by_client=True)
        values = in_parts(task, 1)
        clients = task.evaluate_clients(*task.objective.initial(0))["train_accuracy"]
        for value in (values["train_accuracy"], values["test_accuracy"], *clients.tolist()):
            assert value == pytest.approx(1.0, abs=1e-14)
            assert value <= 1.0
