"""What happens to a batch between the federation and the model."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedexp.data.federation import Batch


class Transform(Protocol):
    """A pure change of a batch, e.g. bytes to normalised floats, and random augmentation.

    Its randomness is drawn on the host and applied where the batch lives. Each (seed, round,
    client) has one generator, and the engine calls `draw` with it step after step, so augmentation
    does not depend on the engine or the device.
    """

    def draw(self, rng: np.random.Generator, examples: int) -> Any:
        """The random numbers for the examples of one step; None where there are none."""
        ...

    def draw_steps(self, rng: np.random.Generator, examples: NDArray[np.int64]) -> Any:
        """What `draw` gives for one step after another, joined along the examples; or None."""
        ...

    def train(self, batch: Batch, draws: Any) -> Batch:
        """The batch as the model sees it in training."""
        ...

    def evaluate(self, batch: Batch) -> Batch:
        """The batch as the model sees it in evaluation."""
        ...
