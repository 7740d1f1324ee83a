"""Shared by the benchmarks: hardware, versions, timing in turns, the engine that ran, records."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedexp

Row = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of several turns.

    >>> print(Timing((10.0, 30.0, 20.0)))
    20 (10-30)
    """

    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)

    def row(self) -> Row:
        """Return the columns of a record: median, spread and number of turns."""
        low, high = min(self.turns), max(self.turns)
        spread = {"ms": self.median, "ms_min": low, "ms_max": high}
        return {**{k: round(v, 3) for k, v in spread.items()}, "turns": len(self.turns)}

    def __str__(self) -> str:
        low, high = min(self.turns), max(self.turns)
        return f"{_short(self.median)} ({_short(low)}-{_short(high)})"


def ratio(slower: Timing, faster: Timing) -> Timing:
    """Return the ratios of two timings, turn by turn: both ran under the same load."""
    return Timing(tuple(a / b for a, b in zip(slower.turns, faster.turns, strict=True)))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Rounds:
    """A simulation run round by round.

    Attributes:
        engine: the engine of the last record, e.g. "dense": what ran, not what was requested.
    """

    def __init__(
        self, records: Iterator[fedexp.Record], device: str = "cpu", rounds: int = 1
    ) -> None:
        self.records, self.device, self.rounds = records, device, rounds
        self.engine = ""

    def __call__(self) -> None:
        """Run the rounds of one turn."""
        for _ in range(self.rounds):
            self.engine = next(self.records).engine
        if self.device == "cuda":
            torch.cuda.synchronize()


def take_turns(
    actions: Mapping[str, Callable[[], object]], turns: int, warm: int = 2
) -> dict[str, Timing]:
    """Time each action `turns` times, after `warm` calls.

    The actions take turns, so that the load of the machine affects all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(warm + turns):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: Timing(tuple(taken[warm:])) for name, taken in times.items()}


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware(device: str = "cpu") -> str:
    """Return the processor or card, cores, load and versions; call it before measuring."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name}, {cores()} cores{load}, {versions}"


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_record(path: Path | None, where: str, rows: Any, **more: Any) -> None:
    """Write the rows with date, hardware and versions as JSON; does nothing without a path.

    `where` is the result of `hardware` before the first measurement.
    """
    if path is None:
        return
    versions = {each.__name__: each.__version__ for each in (fedexp, torch, np)}
    today = datetime.now(UTC).date().isoformat()
    head = {"date": today, "hardware": where, "python": platform.python_version()}
    record = {**head, "versions": versions, **more, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)
