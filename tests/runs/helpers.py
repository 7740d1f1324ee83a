"""Shared by the tests of runs: small specs, and what must be equal in two runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedexp.runs import RunInterrupted, execute
from fedexp.runs.checkpoint import (
    NEWEST,
)
from fedexp.runs.spec import Spec

TINY = (("task.clients", "4"), ("task.rows", "3"), ("task.dim", "20"))


def tiny(algorithm: str = "fedexp-m", rounds: int = 6, **more: Any) -> Spec:
    """A run of milliseconds; three of four clients per round, so that cohorts matter."""
    return Spec("synthetic", algorithm, rounds=rounds, cohort=3, options=TINY, **more)


def nobody(spec: Spec, row: dict[str, Any]) -> None:
    """Ignore the row."""


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


def stop_after(round: int) -> tuple[Callable[[Spec, dict[str, Any]], None], Callable[[], bool]]:
    """Return `on_round` and `stop` arguments that stop a run after a round."""
    seen: list[int] = []
    return lambda spec, row: seen.append(row["round"]), lambda: round in seen


def interrupted(spec: Spec, folder: Path, round: int) -> None:
    """Run a spec until it is stopped after a round."""
    listen, stop = stop_after(round)
    with pytest.raises(RunInterrupted) as stopped:
        execute(spec, None, listen, folder=folder, stop=stop)
    assert (stopped.value.folder, stopped.value.round) == (folder, round)
