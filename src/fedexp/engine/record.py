"""`Record`: what happened in a round, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedexp.engine.state import SimulationState


@dataclass(frozen=True)
class Record:
    """One round. Losses and accuracies are those of the output model, None where not evaluated.

    Attributes:
        round: the round, counted from 1.
        server_lr: the server step size η_g that was taken; None when every client was dropped.
        local_lr: the client step size η_l of the round.
        clients: clients whose update entered the model.
        dropped: clients left out because their update was not finite.
        seconds: time of the round, without evaluation.
        metrics: further numbers of the server rule, e.g. `diversity` and `eps_share` of FedExP.
        engine: the engine that ran, e.g. "batched (layers)".
        state: everything needed to continue from here.
    """

    round: int
    server_lr: float | None
    local_lr: float
    clients: int
    dropped: int
    seconds: float
    train_loss: float | None = None
    train_accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    engine: str = ""
    state: SimulationState = field(repr=False, compare=False, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """The record as one flat JSON object; what is not finite or not there becomes null."""
        own = {
            name: value
            for name, value in vars(self).items()
            if name not in ("metrics", "engine", "state")
        }
        return {name: _jsonable(value) for name, value in {**own, **self.metrics}.items()}


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
