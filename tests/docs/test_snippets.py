"""Every block of code and every command in README and docs runs; see `snippets` and `commands`.

A page runs from top to bottom in a folder of its own, in one namespace. Its Python is also the file
`study.py` in that folder, so that a command can name `study.py:task`. `simulate`, `run`, `compare`
and `tune` are limited to two rounds, two seeds and one process, by wrappers around these functions.
"""

from __future__ import annotations

import inspect
import json
import linecache
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedexp.engine
import fedexp.flower
import fedexp.study
from fedexp import SimulationState
from tests.docs.commands import ROOT, Shell, check_inline
from tests.docs.snippets import Block, Page, PageError, parse_page, split_commands
from tests.helpers.generated_data import write_all

ROUNDS, SEEDS = 2, 2
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks" / "README.md",
        *(ROOT / "examples").rglob("README.md"),
        *(ROOT / "docs").rglob("*.md"),
    )
    if "decisions" not in path.parts and "node_modules" not in path.parts
)
# Python that a page needs and does not define; other pages have a hidden setup block for it.
SETUP = {
    "README.md": """
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

import fedexp as fx
import fedexp.flower
from tests.flower.helpers.fake_grid import FakeGrid

params, deltas, weights = torch.zeros(5), torch.ones(3, 5), torch.ones(3)
ids = np.repeat(np.arange(20), 8)
x = np.random.default_rng(0).normal(size=(160, 4)).astype(np.float32)
y = (x.sum(axis=1) > 0).astype(np.int64)
x_test, y_test = x[:40], y[:40]
mine = fx.fedavg()


def Net():
    return torch.nn.Linear(4, 2)


def f1(outputs, targets):
    found = outputs.argmax(dim=1)
    return 2 * (found * targets).sum() / (found + targets).sum().clamp(min=1)


def digits_grid():
    app = ClientApp()
    app.train()(fedexp.flower.simulated_train(fx.tasks.digits(), seed=0))
    app.evaluate()(fedexp.flower.simulated_evaluate(fx.tasks.digits()))
    return FakeGrid(app, 3)


grid = digits_grid()
"""
}
# Blocks that are compiled or parsed only, by their reason. A new one is added here on purpose.
NO_RUN: dict[str, int] = {}


def parsed(name: str) -> Page:
    try:
        return parse_page((ROOT / name).read_text())
    except PageError as error:
        raise PageError(f"{name}, {error}") from None


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small generated version of every data set."""
    folder = tmp_path_factory.mktemp("data")
    write_all(folder)
    return folder


@pytest.fixture
def scratch(tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, in which runs are short and client state stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDEXP_DATA", str(data_folder))
    monkeypatch.setenv("FEDEXP_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FEDEXP_RUNS", raising=False)
    for name in ("run", "compare", "tune"):
        monkeypatch.setattr(fedexp.study, name, limited(getattr(fedexp.study, name)))
    for module in (fedexp, fedexp.engine):
        monkeypatch.setattr(module, "simulate", limited(fedexp.engine.simulation.simulate))
    strategy = fedexp.flower.RuleStrategy
    monkeypatch.setattr(strategy, "start", limited(strategy.start, rounds="num_rounds"))
    return tmp_path


def limited(function: Callable[..., Any], rounds: str = "rounds") -> Callable[..., Any]:
    """Return the function with at most `ROUNDS` rounds, `SEEDS` seeds, and one process."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = {**bound.arguments.pop("settings", {}), **bound.arguments}
        start = given.get("start")
        most = ROUNDS + (start.round if isinstance(start, SimulationState) else 0)
        given[rounds] = min(given.get(rounds) or most, most)
        if isinstance(given.get("seeds"), int):
            given["seeds"] = min(given["seeds"], SEEDS)
        if "jobs" in given:
            given["jobs"] = 1
        first = given.pop("self", None)
        return function(**given) if first is None else function(first, **given)

    return call


class Study:
    """The Python of a page, as the file `study.py` that is being run.

    Lines have the numbers that they have in the page, after those of the setup.
    """

    def __init__(self, folder: Path, setup: str) -> None:
        self._path, self._lines = folder / "study.py", list[str]()
        self.module = ModuleType("__main__")
        self.module.__file__ = str(self._path)
        self._before = 0
        if setup:
            self.execute(Block(1, "python", setup))
            self._before = len(self._lines)

    def execute(self, block: Block) -> None:
        first = self._before + block.line - 1
        self._lines += [""] * (first - len(self._lines))
        self._lines += block.text.splitlines()
        self._path.write_text("\n".join(self._lines) + "\n")
        linecache.checkcache(str(self._path))
        exec(compile("\n" * first + block.text, str(self._path), "exec"), vars(self.module))


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs(name: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = parsed(name)
    study, shell = Study(scratch, SETUP.get(name, "")), Shell(scratch, ROOT / name)
    monkeypatch.setitem(sys.modules, "__main__", study.module)
    for block in page.blocks:
        try:
            execute(block, study, shell)
        except BaseException as error:
            error.add_note(f"in {name}, the block at line {block.line}")
            raise
    for line, command in page.inline:
        try:
            check_inline(command, shell)
        except Exception as error:
            error.add_note(f"in {name}, line {line}: {command}")
            raise


def execute(block: Block, study: Study, shell: Shell) -> None:
    """Run a block, or as much of it as there is to run."""
    if block.kind == "python":
        if block.no_run is None:
            study.execute(block)
        else:
            compile(block.text, "block", "exec")
    elif block.kind == "commands":
        for words in split_commands(block.text):
            if block.no_run is None:
                shell.execute(words)
    elif block.kind == "toml":
        tomllib.loads(block.text)
    elif block.kind == "json":
        json.loads(block.text)


def test_blocks_that_do_not_run_are_listed() -> None:
    reasons = Counter(
        block.no_run for name in PAGES for block in parsed(name).blocks if block.no_run is not None
    )
    assert reasons == Counter(NO_RUN)
