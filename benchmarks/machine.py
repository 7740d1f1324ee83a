"""What a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def hardware(device: str = "cpu") -> str:
    """The processor or the card, the cores, and how busy the machine was before."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name}, {cores} cores{load}, {versions}"


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
