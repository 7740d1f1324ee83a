"""Shared by the tests of runs: small experiments, and what must be equal in two runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedexp.experiment import Experiment, Resources
from fedexp.runs import Outcome, RunInterrupted, Storage, execute
from fedexp.runs.checkpoint import NEWEST
from fedexp.runs.spec import OnRound

TINY = {"task.clients": "4", "task.rows": "3", "task.dim": "20"}
STORAGE = ("restart", "reopen", "on_open")


def tiny(
    algorithm: str = "fedexp-m",
    rounds: int = 6,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Experiment:
    """Return a run of milliseconds; three of four clients per round, so that cohorts matter."""
    settings = {"cohort": 3, **more}
    return Experiment(
        "synthetic", algorithm, rounds=rounds, options={**TINY, **(options or {})}, **settings
    )


def nobody(experiment: Experiment, row: dict[str, Any]) -> None:
    """Ignore the row."""


def execute_in(
    folder: Path, experiment: Experiment, on_round: OnRound = nobody, **more: Any
) -> Outcome:
    """Execute a run in a folder; `more` are fields of `Storage` and of `Resources`."""
    storage = Storage(folder, **{name: more.pop(name) for name in STORAGE if name in more})
    return execute(experiment, storage, on_round, Resources(**more))


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def essence(folder: Path) -> dict[str, Any]:
    """Return all of a finished run that must not depend on interruptions."""
    lines = (folder / "records.jsonl").read_text().splitlines()
    newest = json.loads((folder / NEWEST).read_text())
    result = json.loads((folder / "result.json").read_text())
    return {
        "rows": untimed([json.loads(line) for line in lines]),
        "model": (folder / "model.safetensors").read_bytes(),
        "state": newest["model"]["sha256"],
        "result": {name: value for name, value in result.items() if name != "seconds"},
        "spec": (folder / "spec.toml").read_text(),
    }


def stop_after(round: int) -> tuple[OnRound, Callable[[], bool]]:
    """Return `on_round` and `stop` arguments that stop a run after a round."""
    seen: list[int] = []
    return lambda experiment, row: seen.append(row["round"]), lambda: round in seen


def interrupted(experiment: Experiment, folder: Path, round: int, **more: Any) -> None:
    """Execute a run until it is stopped after a round."""
    listen, stop = stop_after(round)
    with pytest.raises(RunInterrupted) as stopped:
        execute_in(folder, experiment, listen, stop=stop, **more)
    assert (stopped.value.folder, stopped.value.round) == (folder, round)
