"""A simulated run at work on its folder: records are kept, and the end is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedexp.engine import Record, SimulationState
from fedexp.engine.keep_clients import KeepClients, Where
from fedexp.engine.sharing import Sharing
from fedexp.errors import DivergedError
from fedexp.experiments.outcome import Row
from fedexp.experiments.spec import Run
from fedexp.objective import Buffers
from fedexp.runs.folder import RunFolder
from fedexp.runs.journal import Journal
from fedexp.runs.slots import SLOTS, make_private
from fedexp.runs.tensors import to_bytes


class Session(Journal):
    """Everything that changes while a run trains.

    Args:
        run: what is trained.
        folder: the run's own, held.
        every: seconds between checkpoints; 0 for one a round.
        keep: where clients' states lie; on the disk, in the folder.
        sharing: with which other processes it is trained.
    """

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        every: float,
        keep: Where = "auto",
        sharing: Sharing | None = None,
    ) -> None:
        super().__init__(folder, every, device_of(run))
        self.run, self._sharing = run, sharing
        self._keep = KeepClients(keep, folder.path / SLOTS)
        if keep != "memory" and run.setup.algorithm.client.init_local(torch.zeros(1)):
            make_private(folder.path / SLOTS)

    def remaining(self) -> Iterator[Record]:
        """Train from where the run is to its end, if it is not there yet."""
        return remaining(self.run, self.state, self.rows, self._keep, self._sharing)

    def keep(self, record: Record) -> Row:
        """Add the row of a round, and checkpoint where it is time."""
        row = record.to_json()
        self.add(row, record.state)
        return row

    def finish(self, error: DivergedError | None) -> dict[str, Any]:
        """Write the end of the run: its model, or why it has none."""
        status = "diverged" if error else "target" if self._at_target() else "finished"
        model = None
        if error is None and self.state is not None:
            model = model_bytes(self.run, self.state)
        return self.conclude(status, model, error)

    def _at_target(self) -> bool:
        return bool(self.rows) and self.run.reached(self.rows[-1])


def remaining(
    run: Run,
    state: SimulationState | None,
    rows: Sequence[Row],
    keep: KeepClients,
    sharing: Sharing | None = None,
) -> Iterator[Record]:
    """The records that a run has still to make: to its last round, or to its target."""
    if rows and (len(rows) >= run.rounds or run.reached(rows[-1])):
        return
    for record in run.records(state, keep, sharing):
        yield record
        if run.reached(record.to_json()):
            return


def model_bytes(run: Run, state: SimulationState) -> bytes:
    """The output model: a module's `state_dict`, or the plain parameters of what is none."""
    params, buffers = state.output()
    on_host = params.cpu(), Buffers(*(each.cpu() for each in buffers))
    load = getattr(run.task.objective, "load", None)
    module = load(*on_host) if load else None
    named: dict[str, Tensor] = {"params": on_host[0]}
    return to_bytes(module.state_dict() if isinstance(module, nn.Module) else named)


def device_of(run: Run) -> torch.device:
    """Where the run's tensors are to be, as `simulate` decides it."""
    given = run.spec.device
    return torch.device(given) if given else next(iter(run.task.train.fields.values())).device
