"""Settings for all tests: repeatable, and at ease with a busy machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("fedexp", deadline=None, derandomize=True)
settings.load_profile("fedexp")
torch.set_num_threads(1)  # the suite already uses one process a core


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`; whoever asks for another `--dist` gets it."""
    from tests.helpers.scheduling import Together

    return Together(config, log) if config.getvalue("dist") == "load" else None
