"""What the tests of runs share: small specs, and what must be the same in two runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedexp.runs import RunInterrupted, execute
from fedexp.runs.checkpoint import NEWEST
from fedexp.runs.spec import Spec

TINY = (("task.clients", "4"), ("task.rows", "3"), ("task.dim", "20"))


def tiny(algorithm: str = "fedexp-m", rounds: int = 6, **more: Any) -> Spec:
    """A run of milliseconds; three of four clients a round, so that cohorts matter."""
    return Spec("synthetic", algorithm, rounds=rounds, cohort=3, options=TINY, **more)


def nobody(spec: Spec, row: dict[str, Any]) -> None:
    """Does not listen."""


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def essence(folder: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on how often it was interrupted."""
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
    """A listener and a wish: stop once that round has been heard of."""
    heard: list[int] = []
    return lambda spec, row: heard.append(row["round"]), lambda: round in heard


def interrupted(spec: Spec, folder: Path, round: int) -> None:
    """A run that stopped cleanly after the round."""
    listen, wish = stop_after(round)
    with pytest.raises(RunInterrupted) as stopped:
        execute(spec, None, listen, folder=folder, stop=wish)
    assert (stopped.value.folder, stopped.value.round) == (folder, round)
