"""Settings for all tests: repeatable, and at ease with a busy machine."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("fedexp", deadline=None, derandomize=True)
settings.load_profile("fedexp")
torch.set_num_threads(1)  # the suite already uses one process a core
