"""Settings for all tests: reproducible, and without time limits for a busy machine."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("fedexp", deadline=None, derandomize=True)
settings.load_profile("fedexp")
torch.set_num_threads(1)  # the suite already uses one process per core


def pytest_configure() -> None:
    """Look for no garbage among the thousands of tests while they are collected, nor later."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Use our scheduler with `-n`, unless another `--dist` is chosen."""
    from tests.helpers.scheduling import GroupedScheduling

    return GroupedScheduling(config, log) if config.getvalue("dist") == "load" else None
