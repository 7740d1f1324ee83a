"""The command line that repeats a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

# Options of `fedexp run` that are left out where they have their default.
DEFAULTS = {"mode": "paper", "engine": "auto", "device": None, "precision": None}


def rerun(spec: Mapping[str, Any]) -> str:
    """`fedexp run ...`, quoted for a shell; names every number that a task would choose itself.

    >>> rerun({"task": "toy", "algorithm": "fedexp", "seed": 1, "rounds": 9, "evaluate_every": 2,
    ...        "set": {"eps": "0.1"}})
    'fedexp run toy --algorithm fedexp --seed 1 --rounds 9 --cohort all --evaluate-every 2
        --set eps=0.1'
    """
    if spec.get("engine") == "flower":
        return "flwr run ."
    words = ["fedexp", "run", spec["task"], "--algorithm", spec["algorithm"]]
    words += ["--seed", spec["seed"], "--rounds", spec["rounds"]]
    words += ["--cohort", spec.get("cohort") or "all", "--evaluate-every", spec["evaluate_every"]]
    for name, default in DEFAULTS.items():
        if spec.get(name, default) != default:
            words += [f"--{name}", spec[name]]
    if spec.get("stop_at") is not None:
        words += ["--stop-at", spec["stop_at"]]
    if spec.get("deterministic"):
        words += ["--deterministic"]
    for key, value in spec.get("set", {}).items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(map(str, words))
