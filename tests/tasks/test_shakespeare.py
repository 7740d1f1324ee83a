"""The task `shakespeare` on a small generated corpus: what counts, both models, and stored runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedexp as fx
from fedexp.cli.main import main
from fedexp.data.datasets import load
from fedexp.data.sources import shakespeare as source
from fedexp.models import CharLSTM, char_lstm, char_transformer, tinygpt
from fedexp.objective import Buffers, ModuleObjective
from fedexp.runs.fingerprint import fingerprint
from fedexp.tasks.evaluation import worst_decile
from fedexp.tasks.shakespeare import BEGIN, PAD, counted_part, with_counted_targets
from fedexp.tasks.task import Task
from tests.helpers.errors import assert_refused
from tests.helpers.generated_data import write_plays


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data folder with two short plays, in the layout of the real package."""
    path = tmp_path_factory.mktemp("data")
    write_plays(path)
    return path


@pytest.fixture(scope="module")
def task(folder: Path) -> Task:
    return fx.tasks.shakespeare(folder=str(folder))


def initial(task: Task) -> tuple[torch.Tensor, Buffers]:
    return task.objective.initial(0)


def test_the_settings_of_reddi_et_al_with_tuned_step_sizes(task: Task) -> None:
    assert (task.name, task.train.clients, task.cohort, task.rounds) == (
        "shakespeare",
        10,
        10,
        1200,
    )
    local = task.local
    assert (local.epochs, local.batch_size, local.lr) == (1, 4, 10**0.5)
    assert (local.weight_decay, local.clip_norm, local.lr_decay) == (0.0, None, 1.0)
    assert str(task.goal) == "max:test_accuracy"
    adagrad = fx.Experiment(task, "fedadagrad").setup.options()
    assert adagrad["server.lr"] == pytest.approx(10**-0.5)
    assert (adagrad["server.tau"], adagrad["local.lr"]) == (0.1, 10**0.5)


def test_special_tokens_are_those_of_the_data() -> None:
    assert (PAD, BEGIN) == (source.PAD, source.BEGIN)


def test_padding_and_begin_do_not_count_but_end_does(folder: Path, task: Task) -> None:
    y, counted = load("shakespeare", folder).train["y"], task.train.fields["y"]
    assert bool((y == BEGIN).any())
    assert not bool((counted == BEGIN).any())
    left_out = (y == source.PAD) | (y == source.BEGIN)
    assert torch.equal(counted == PAD, left_out)
    assert torch.equal(counted[~left_out], y[~left_out])
    assert bool((counted == source.END).any())
    expected = (~left_out).float().mean(dim=1)
    torch.testing.assert_close(counted_part({"y": counted}), expected)


def test_loss_and_accuracy_are_means_over_counted_characters(task: Task) -> None:
    params, buffers = initial(task)
    network = task.objective.load(params, buffers).eval()  # type: ignore[attr-defined]
    assert task.test is not None
    train = [task.train.client(i) for i in range(task.train.clients)]
    found = task.evaluate(params, buffers)
    with torch.no_grad():
        plain = []
        for batch in (task.test, *train):
            scores, y = network(batch["x"]).transpose(1, 2).flatten(0, 1), batch["y"].flatten()
            real = y != PAD
            loss = F.cross_entropy(scores[real], y[real]).item()
            plain.append((loss, (scores[real].argmax(dim=1) == y[real]).double().mean().item()))
    (test_loss, test_accuracy), *clients = plain
    assert found["test_loss"] == pytest.approx(test_loss, rel=1e-5)
    assert found["test_accuracy"] == pytest.approx(test_accuracy, rel=1e-5)
    assert found["train_loss"] == pytest.approx(np.mean([loss for loss, _ in clients]), rel=1e-5)
    assert found["train_accuracy"] == pytest.approx(np.mean([a for _, a in clients]), rel=1e-5)


def test_every_role_can_be_evaluated(task: Task) -> None:
    params, buffers = initial(task)
    network = task.objective.load(params, buffers).eval()  # type: ignore[attr-defined]
    each = task.evaluate_clients(params, buffers)
    assert task.test is not None
    assert task.test_offsets is not None
    losses = []
    for start, end in zip(task.test_offsets, task.test_offsets[1:], strict=False):
        batch = {name: value[start:end] for name, value in task.test.items()}
        with torch.no_grad():
            losses.append(F.cross_entropy(network(batch["x"]), batch["y"], ignore_index=PAD))
    torch.testing.assert_close(each["test_loss"].float(), torch.stack(losses), rtol=1e-5, atol=0)
    assert each.keys() == {"train_loss", "train_accuracy", "test_loss", "test_accuracy"}
    worst = worst_decile(each["test_accuracy"], highest=False)
    assert worst == pytest.approx(each["test_accuracy"].min().item())


def test_a_role_without_test_text_leaves_the_test_data_pooled(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    data = replace(load("shakespeare", folder), test_offsets=None)
    module = import_module("fedexp.tasks.shakespeare")
    monkeypatch.setattr(module, "load_splits", lambda name, folder: data)
    task = fx.tasks.shakespeare()
    assert task.test_offsets is None
    assert task.evaluate(*initial(task))["test_loss"] > 0


def small_objective() -> ModuleObjective:
    loss = torch.nn.CrossEntropyLoss(ignore_index=PAD, reduction="none")
    return ModuleObjective(partial(CharLSTM, 90, 4, 8, 2), loss, ignore_index=PAD)


def test_the_gradient_is_that_of_the_masked_mean_times_the_counted_fraction(task: Task) -> None:
    objective, batch = small_objective(), task.train.client(0)
    params, buffers = objective.initial(0)
    gradient, _ = objective.gradient(params, buffers, batch)
    network = objective.load(params, buffers)
    loss = F.cross_entropy(network(batch["x"]), batch["y"], ignore_index=PAD)
    grads = torch.autograd.grad(loss, list(network.parameters()))
    masked = torch.cat([grad.flatten() for grad in grads])
    fraction = counted_part(batch).mean()
    assert 0 < fraction < 1
    torch.testing.assert_close(gradient, fraction * masked, rtol=1e-4, atol=1e-7)


def test_clients_of_unequal_length_can_be_batched(task: Task) -> None:
    objective = small_objective()
    params, buffers = objective.initial(0)
    clients = [{n: v[:2] for n, v in task.train.client(i).items()} for i in (0, 9)]
    sizes = [len(client["y"]) for client in clients]
    rows = max(sizes)
    padded = {
        name: torch.stack([F.pad(c[name], (0, 0, 0, rows - len(c[name]))) for c in clients])
        for name in ("x", "y")
    }
    valid = torch.arange(rows) < torch.tensor(sizes)[:, None]
    both = Buffers(*(each.expand(2, -1) for each in buffers))
    batched, _ = objective.gradients(params.expand(2, -1), both, padded, valid)
    for own, client in zip(batched, clients, strict=True):
        expected, _ = objective.gradient(params, buffers, client)
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", [char_lstm, char_transformer, partial(tinygpt, context=80)])
def test_models_do_not_see_later_characters(build: Callable[[], torch.nn.Module]) -> None:
    network = build().eval()
    x = torch.randint(1, 87, (2, 80), generator=torch.Generator().manual_seed(0))
    other = torch.cat([x[:, :40], x[:, 40:].flip(1)], dim=1)
    with torch.no_grad():
        first, second = network(x), network(other)
    assert first.shape == (2, 90, 80)
    torch.testing.assert_close(first[:, :, :40], second[:, :, :40])
    assert not torch.allclose(first[:, :, 41:], second[:, :, 41:])


def test_a_run_learns(task: Task) -> None:
    task = replace(task, by_client=True)
    records = list(fx.simulate(task, "fedexp", rounds=3, evaluate_every=1))
    first, last = records[0].to_json(), records[-1].to_json()
    assert last["train_loss"] < first["train_loss"]
    assert last["test_accuracy_worst_decile"] <= last["test_accuracy"]


def test_the_two_models_are_different_runs(folder: Path, tmp_path: Path) -> None:
    lstm, transformer = (
        fx.tasks.shakespeare(model, str(folder)) for model in ("lstm", "transformer")
    )
    assert (lstm.name, transformer.name) == ("shakespeare", "shakespeare-transformer")
    different = fingerprint(lstm, fx.fedavg(), 0).differences(
        fingerprint(transformer, fx.fedavg(), 0)
    )
    assert "the code or the layers of the model" in different
    run = ["run", "shakespeare", "--algorithm", "fedavg", "--rounds", "1", "--cohort", "1"]
    run += ["--quiet", "--runs", str(tmp_path), "--set", f"task.folder={folder}"]
    for model in ("lstm", "transformer"):
        assert main([*run, "--set", f"task.model={model}"]) == 0
    specs = [path.read_text() for path in tmp_path.glob("*/spec.toml")]
    assert len(specs) == 2
    assert sum('model = "transformer"' in spec for spec in specs) == 1


def test_mistakes_are_one_line(folder: Path, tmp_path: Path) -> None:
    assert_refused(lambda: fx.tasks.shakespeare("gru"), "lstm or transformer", "'gru'")  # type: ignore[arg-type]
    assert_refused(
        lambda: fx.tasks.shakespeare(folder=str(tmp_path / "none")),
        "shakespeare is not in",
        "run 'fedexp data fetch shakespeare'",
        "or shakespeare_train.h5 and shakespeare_test.h5",
    )


def test_targets_are_not_changed_in_the_data() -> None:
    batch = {"x": torch.tensor([[END := source.END]]), "y": torch.tensor([[BEGIN]])}
    assert with_counted_targets(batch)["y"].tolist() == [[PAD]]
    assert batch["y"].tolist() == [[BEGIN]]
    assert batch["x"].tolist() == [[END]]
