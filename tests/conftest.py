"""Settings for all tests: reproducible, and without time limits for a busy machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("fedexp", deadline=None, derandomize=True)
settings.load_profile("fedexp")
torch.set_num_threads(1)  # the suite already uses one process per core
LONGEST = [
    "flower/deploy/",
    "docs/",
    "distributed/",
    "engine/test_zoo.py",
    "golden/",
    "outer/",
    "test_api.py",
    "test_user_objects.py",
]


def pytest_configure() -> None:
    """Look for no garbage among the thousands of tests while they are collected, nor later."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that none is alone at the end."""

    def place(item: pytest.Item) -> int:
        places = (k for k, name in enumerate(LONGEST) if item.nodeid.startswith(f"tests/{name}"))
        return next(places, len(LONGEST))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each file in one worker with `-n`: its tests share processes, files and results."""
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "load":
        return None
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Write `study.py` of a user into the working directory, where runs are stored; import it."""
    from fedexp.references import load_object
    from tests.helpers.own_study import write_study

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDEXP_RUNS", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_study(tmp_path)
    load_object("study.py:task")
    yield sys.modules["study"]
    sys.modules.pop("study", None)
