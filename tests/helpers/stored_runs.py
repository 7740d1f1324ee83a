"""Stored runs of the toy task with made-up records, in memory or in a run folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fedexp.algorithms import ALGORITHMS
from fedexp.runs import StoredRun, frozen, load_run
from fedexp.runs.records import Row
from fedexp.runs.folder import environment
from fedexp.runs.spec import Spec, spec_text

FINISHED = {"status": "finished", "rounds": 30, "diverged_at": None, "seconds": 2.5}


def rows(count: int, speed: float = 0.1, seed: int = 0) -> list[Row]:
    """Return the records of a run that learns, as a function of the arguments."""
    made = []
    for at in range(1, count + 1):
        loss = math.exp(-speed * at) * (1 + 0.1 * math.sin(at + seed))
        made.append(
            {
                "round": at,
                "server_lr": 1 + 0.5 * math.cos(at + seed) ** 2,
                "clients": 2,
                "dropped": 0,
                "seconds": 0.01,
                "train_loss": loss,
                "test_accuracy": 1 - 0.5 * loss if at % 2 else None,
                "diversity": 2 + math.cos(at + seed) ** 2,
            }
        )
    return made


def stored(
    algorithm: str = "fedexp",
    seed: int = 0,
    count: int = 30,
    result: dict[str, Any] | None = FINISHED,
    *,
    options: dict[str, str] | None = None,
    speed: float = 0.1,
    **more: Any,
) -> StoredRun:
    """Return a run of the toy task; `options` are its `--set` pairs and need not be valid.

    An algorithm that is not of the package has the options of FedExP.
    """
    base = algorithm if algorithm in ALGORITHMS else "fedexp"
    spec = frozen(Spec("toy", base, seed, rounds=30).prepare()) | {"algorithm": algorithm}
    spec["set"] = dict(options or {})
    own = {key: value for key, value in (options or {}).items() if not key.startswith("task.")}
    spec["options"] |= own
    spec |= more
    known = {"metric": "test_accuracy", "target": 0.9, "fedexp": "0.1", "started": "2026-01-02"}
    folder = Path("runs", f"toy-{algorithm}-s{seed}")
    return StoredRun(folder, spec, known, rows(count, speed, seed), result)


def write(root: Path, algorithm: str, seed: int, count: int = 30, speed: float = 0.1) -> Path:
    """Write a run to disk, unfinished if it has fewer than 30 rounds; return its folder."""
    base = algorithm if algorithm in ALGORITHMS else "fedexp"
    run = Spec("toy", base, seed, rounds=30).prepare()
    folder = root / f"{algorithm}-{seed}"
    folder.mkdir(parents=True)
    spec = frozen(run) | {"algorithm": algorithm}
    folder.joinpath("spec.toml").write_text(spec_text(spec))
    known = environment(run) | {"metric": "test_accuracy", "target": 0.9}
    known["goal"] = "max:test_accuracy"
    folder.joinpath("environment.json").write_text(json.dumps(known))
    lines = "".join(json.dumps(row) + "\n" for row in rows(count, speed, seed))
    folder.joinpath("records.jsonl").write_text(lines)
    if count == 30:
        folder.joinpath("result.json").write_text(json.dumps(FINISHED))
    load_run(folder)  # it is readable
    return folder
