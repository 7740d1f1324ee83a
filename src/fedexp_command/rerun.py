"""The `fedexp run` command of a stored run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from fedexp_command.parsers import FLAGS

USUAL = {"mode": "paper", "engine": "auto"}  # left out


def rerun(spec: Mapping[str, Any], flags: Iterable[str] = ("seed", *FLAGS)) -> str:
    """Return the `fedexp run` command of a spec, quoted for a shell, with all task defaults.

    Args:
        spec: the spec.
        flags: the fields whose options are in the command; others have their defaults.

    >>> rerun({"task": "toy", "algorithm": "fedexp", "seed": 1, "rounds": 9, "evaluate_every": 2,
    ...        "set": {"eps": "0.1"}})
    'fedexp run toy --algorithm fedexp --seed 1 --rounds 9 --cohort all --evaluate-every 2
        --set eps=0.1'
    """
    if spec.get("engine") == "flower":
        return "flwr run ."
    names = [spec.get(f"{name}_source") or spec[name] for name in ("task", "algorithm")]
    options = spec.get("set", {})
    if any(
        str(text).startswith("session:")
        for text in (*names, spec.get("cohort_source"), *options.values())
    ):
        listed = ", ".join(name.rpartition(":")[2] for name in names)
        return f"# in Python, with the same objects: fedexp.run({listed}, seed={spec['seed']})"
    words = ["fedexp", "run", names[0], "--algorithm", names[1]]
    for name in flags:
        value = spec.get(f"{name}_source") or spec.get(name, "all" if name == "cohort" else None)
        by_task = name == "cohort" and isinstance(value, str) and value != "all"
        by_task = by_task and ":" not in value  # a function of the task
        if value is None or value is False or value == USUAL.get(name) or by_task:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, Mapping):
            pairs = (f"{key}={item}" for key, item in value.items() if key != "kind")
            value = f"{value['kind']}:{','.join(pairs)}"
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, list) else value)
    for key, value in options.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(map(str, words))
