"""How a run is kept and watched, and what it says when it is asked to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedexp.distributed import Shared
from fedexp.engine.keep_clients import Where
from fedexp.errors import FedExPError
from fedexp.runs.consumers import Consumer

CHECKPOINT_EVERY = 10.0  # seconds


class Stopped(FedExPError):
    """A run was asked to stop, and did after `round`; it can go on from `folder`."""

    def __init__(self, folder: Path | None, round: int) -> None:
        super().__init__(f"stopped after round {round}")
        self.folder, self.round = folder, round


@dataclass(frozen=True)
class Keeping:
    """How a run is kept and watched; none of it changes what is computed.

    Args:
        checkpoint_every: seconds between checkpoints; 0 for one a round.
        restart: discard what the folder holds of this run, and start over.
        reopen: continue a run that ended as diverged from its last checkpoint.
        stop: asked after every round whether to stop there.
        consumers: told of the beginning, of every new round and of the end.
        keep_clients: where clients' states lie: "memory", "disk", or "auto" for what fits.
        sharing: with which ranks the work is shared; None for a process that does it alone.
        on_open: told once of the folder, of how many rounds it holds already, and whether that
            is all of them.
    """

    checkpoint_every: float = CHECKPOINT_EVERY
    restart: bool = False
    reopen: bool = False
    stop: Callable[[], bool] = lambda: False
    consumers: Sequence[Consumer] = ()
    keep_clients: Where = "auto"
    sharing: Shared | None = None
    on_open: Callable[[Path, int, bool], None] = lambda folder, rounds, over: None
