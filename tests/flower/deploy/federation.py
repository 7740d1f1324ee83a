"""The example's federation of real processes, with the app of these tests and what to expect."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedexp.algorithms import ALGORITHMS
from fedexp.engine.plan import Work
from fedexp.engine.simulation import run_round
from fedexp.engine.state import Record, SimulationState
from fedexp.objective import ModuleObjective
from fedexp.runs import load_run
from fedexp.runs.checkpoint import NEWEST

APP = Path(__file__).parent / "app"
EXAMPLE = Path(__file__).parents[3] / "examples" / "flower_app"
sys.path += [str(APP), str(EXAMPLE)]

from faulty_app.problem import LOCAL, SEED, problem  # noqa: E402
from local_federation import LocalFederation, RunOutcome  # noqa: E402

ALL = (0, 1, 2)
PATIENCE = 400.0  # seconds for a whole run on a busy machine; not a claim about speed


class Deployment(LocalFederation):
    """Runs the app of these tests, each time in a folder of its own."""

    def go(self, name: str, **config: Any) -> RunOutcome:
        """Run the app to its end."""
        return self.wait(self.begin(name, **config), PATIENCE)

    def begin(self, name: str, **config: Any) -> Popen[bytes]:
        """Submit the app; underscores in names stand for the dashes of Flower's."""
        named = {key.replace("_", "-"): value for key, value in config.items()}
        return self.submit(APP, {"checkpoint": str(self.folder / "runs" / name), **named})

    def rows(self, name: str, algorithm: str = "fedexp") -> list[dict[str, Any]]:
        """The rounds that a run has written so far."""
        folder = self.folder / "runs" / name / algorithm
        return load_run(folder).rows if (folder / "spec.toml").exists() else []

    def received(self, *nodes: int) -> int:
        """Return how many messages each of the nodes has received, all nodes by default."""
        logs = (self.processes.log(f"node-{number}") for number in nodes or range(self.nodes))
        return min(log.count("Received successfully") for log in logs)

    def has_checkpoint(self, name: str, algorithm: str = "fedexp") -> bool:
        """Whether a run could resume; the checkpoint is written a moment after the row."""
        return (self.folder / "runs" / name / algorithm / NEWEST).exists()

    def assert_same(self, name: str, expected: list[Record], algorithm: str = "fedexp") -> None:
        """Step sizes and weights agree to float32 rounding, round by round."""
        rows = self.rows(name, algorithm)
        steps = [row["server_lr"] for row in rows]
        assert steps == pytest.approx([record.server_lr for record in expected], rel=1e-5)
        assert [row["clients"] for row in rows] == [record.clients for record in expected]
        model = load_file(self.folder / "runs" / name / algorithm / "model.safetensors")
        wanted = weights(expected[-1])
        assert model.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(model[key], value)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited in vain for {what}")
        time.sleep(0.2)


def simulated(algorithm: str, cohorts: Sequence[Sequence[int]]) -> list[Record]:
    """The same rounds in the simulator, with the clients that took part in each."""
    task, rule = problem(), ALGORITHMS[algorithm]()
    state = SimulationState.initial(task, rule, SEED)
    records = []
    for number, cohort in enumerate(cohorts, start=1):
        work = Work(task, rule, LOCAL, "uniform", SEED, number, np.array(cohort))
        records.append(run_round(work, state))
        state = records[-1].state
    return records


def weights(record: Record) -> dict[str, Tensor]:
    """The model that a simulation returns after a round."""
    objective = problem().objective
    assert isinstance(objective, ModuleObjective)
    return objective.load(*record.state.output()).state_dict()
