"""Fabricated runs of studies, with known curves, in memory or as an archive on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedexp.algorithms import ALGORITHMS
from fedexp.experiment import Row
from fedexp.local import LocalTraining
from fedexp.options import Setup
from fedexp.plain import id_of
from fedexp.reproduce import STUDIES
from fedexp.reproduce.study import Plan, Request, experiment_of
from fedexp.runs import StoredRun
from fedexp.runs.read import texts
from fedexp.runs.spec import FORMAT

WHERE = {
    "fedexp": "0.1.0",
    "torch": "2",
    "numpy": "2",
    "python": "3.11",
    "device": "a device",
    "started": "2026-01-02T03:04:05+0000",
}


def fabricated(
    study: str,
    task: str,
    series: str,
    seed: int = 0,
    hit: int | None = 200,
    end: float = 0.9,
    mode: str = "paper",
    **changed: Any,
) -> StoredRun:
    """Return a run of a study whose accuracy is 0 before round `hit` and `end` from there."""
    own = STUDIES[study]
    plan = Plan(own, Request(mode=mode), own.tasks, own.rounds)
    (arm,) = (arm for arm in own.arms(task) if arm.series == series)
    wanted = experiment_of(plan, task, arm)
    setup = Setup(ALGORITHMS[arm.algorithm](), LocalTraining())
    options = dict(setup.parse(name, text) for name, text in arm.options)
    spec: dict[str, Any] = {
        "task": task,
        "algorithm": arm.algorithm,
        "mode": mode,
        "seed": seed,
        "rounds": own.rounds,
        "cohort": 20,
        "clients": 3400,
        "evaluate_every": wanted.evaluate_every,
        "engine": "auto",
        "device": "cuda",
        "precision": "bf16",
        "deterministic": False,
        "set": dict(arm.options),
        "changed": list(options),
        "arguments": {},
        "options": {"server.eps": 0.001, **options},
        **changed,
    }
    rows = [_row(at, hit, end, spec["evaluate_every"]) for at in range(1, spec["rounds"] + 1)]
    result = {"status": "finished", "rounds": len(rows), "seconds": 60.0, "diverged_at": None}
    name = id_of(spec)
    return StoredRun(Path(name), {"format": FORMAT, "id": name, **spec}, WHERE, rows, result)


def _row(at: int, hit: int | None, end: float, every: int) -> Row:
    low = 0.0 if hit is None or at < hit else end
    judged = low if at % every == 0 else None
    shown = {"test_accuracy": judged, "train_accuracy": judged, "train_loss": None}
    return {"round": at, "server_lr": 1.5, "seconds": 0.1, "eps_share": 0.25, **shown}


def store(folder: Path, runs: Iterable[StoredRun]) -> None:
    """Write runs as `fedexp archive` does."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    for run in runs:
        described, rounds = texts(run)
        (folder / "runs" / f"{run.spec['id']}.toml").write_text(described)
        (folder / "runs" / f"{run.spec['id']}.csv").write_text(rounds)
