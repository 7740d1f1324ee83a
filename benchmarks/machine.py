"""What a benchmark ran on, how contestants take turns, and how a record is written."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedexp

Row = dict[str, Any]


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware(device: str = "cpu") -> str:
    """The processor or the card, the cores, and how busy the machine was before."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name}, {cores()} cores{load}, {versions}"


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def take_turns(
    rounds: Mapping[str, Callable[[], object]], counted: int, warm: int = 2
) -> dict[str, float]:
    """The median milliseconds of a round of each, after some to warm up.

    One round of each follows one of the others, so that what else the machine does meets all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(warm + counted):
        for name, one_round in rounds.items():
            began = time.perf_counter()
            one_round()
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(taken[warm:]) for name, taken in times.items()}


def write_record(path: Path | None, where: str, rows: Any, **more: Any) -> None:
    """Keep what was measured, with date, hardware and versions, where a path is given.

    `where` is what `hardware` said before anything was measured.
    """
    if path is None:
        return
    versions = {each.__name__: each.__version__ for each in (fedexp, torch, np)}
    head = {"date": today(), "hardware": where, "python": platform.python_version()}
    record = {**head, "versions": versions, **more, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)
