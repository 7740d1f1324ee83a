"""`spec.toml`: a run's frozen spec, readable, and the id that follows from it."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedexp.errors import UsageError, require, shown
from fedexp.experiments.spec import Run, Spec
from fedexp.runs.foreign import parse_toml, spec_fault

TYPED = ("set", "changed")  # how options came about, which decides nothing
FORMAT = 2  # 1: the id covered options as they were typed, and no arguments of the task
SPEC = "spec.toml"
HEAD = "# A run of fedexp, frozen. Continue it with: fedexp resume THIS-FOLDER\n"


def frozen(run: Run) -> dict[str, Any]:
    """Everything that decides what a run computes, as TOML holds it.

    TOML has no null: what is None at the top is left out, and among options it is the word
    "none", as `--set` takes it.
    """
    described = run.describe()
    plain = {name: _plain(value) for name, value in described.items() if value is not None}
    return tomllib.loads(tomli_w.dumps(plain))


def run_id(run: Run) -> str:
    """The name of a run: what it is, and the start of a digest of its frozen spec."""
    return id_of(frozen(run))


def folder_of(run: Run, root: Path) -> Path:
    """Return the folder of a run among all runs; that of an older version where it is there."""
    spec = frozen(run)
    folder, older = root / id_of(spec), root / id_of(_first_format(spec), format=1)
    return older if not is_run(folder) and is_run(older) else folder


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run; before its spec it has nothing that counts."""
    return (path / SPEC).is_file()


def spec_text(spec: Mapping[str, Any], head: str = HEAD) -> str:
    """The text of `spec.toml` for a frozen spec."""
    return head + tomli_w.dumps({"format": FORMAT, "id": id_of(spec), **spec})


def read_spec(folder: Path) -> dict[str, Any]:
    """What `spec.toml` holds; refuses one that is damaged, changed, or of another format."""
    path = folder / SPEC
    try:
        spec = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{folder} is not a run: cannot read {SPEC}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(
            f"{path} is damaged: {shown(error)}; remove {folder}, and run it again"
        ) from None
    format = checked_format(spec, path)
    own = {name: value for name, value in spec.items() if name not in ("format", "id")}
    require(
        own.keys() >= {"task", "algorithm", "seed"} and spec.get("id") == id_of(own, format),
        f"{path} has been changed since the run began; put it back, or start another run",
    )
    fault = spec_fault(own)
    require(fault is None, f"{path} is not the spec of a run: {fault}; start another run")
    return spec


def checked_format(spec: Mapping[str, Any], path: Path) -> int:
    """Return the format of a spec; refuse one that this version does not read."""
    found = spec.get("format")
    require(
        type(found) is int and found in (1, FORMAT),
        f"{path} has format {shown(found)}, this fedexp reads up to {FORMAT}; use the other one",
    )
    return int(found or FORMAT)


def spec_from(spec: Mapping[str, Any]) -> Spec:
    """The spec whose run froze to this."""
    return Spec(
        task=spec["task"],
        algorithm=spec["algorithm"],
        seed=spec["seed"],
        rounds=spec["rounds"],
        cohort=spec.get("cohort", 0),
        mode=spec["mode"],
        evaluate_every=spec["evaluate_every"],
        engine=spec["engine"],
        device=spec.get("device"),
        precision=spec.get("precision"),
        stop_at=spec.get("stop_at"),
        deterministic=spec["deterministic"],
        options=tuple(spec["set"].items()),
    )


def check_same(spec: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Refuse to continue a run as another one: an option may have changed its default since."""
    old = spec.get("format") == 1
    now, then = (_flat(_compared(each, old)) for each in (wanted, spec))
    changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    if changed:
        name = changed[0]
        raise UsageError(
            f"{folder} holds another run: there {shown(name)} is {shown(then.get(name))}, here it "
            f"is {now.get(name)}; choose another folder"
        )


def id_of(spec: Mapping[str, Any], format: int = FORMAT) -> str:
    """The id of a frozen spec.

    Options count as they are resolved, not as they were typed; in format 1 both counted.

    >>> spec = {"task": "toy", "algorithm": "fedexp", "seed": 0, "options": {"server.eps": 0.0}}
    >>> id_of({**spec, "set": {"eps": "0"}}) == id_of({**spec, "set": {}}) == id_of(spec)
    True
    """
    resolved = {name: value for name, value in spec.items() if name not in TYPED}
    counted = spec if format == 1 else _canonical(resolved)
    text = json.dumps(counted, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{spec['task']}-{spec['algorithm']}-s{spec['seed']}-{digest}"


def _canonical(value: Any) -> Any:
    """Write equal numbers as the same text: 1 and 1.0, 0 and -0.0."""
    if isinstance(value, Mapping):
        return {name: _canonical(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _first_format(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a frozen spec as format 1 had it: without the resolved arguments of the task."""
    return {n: value for n, value in spec.items() if n not in ("arguments", "changed")}


def _compared(spec: Mapping[str, Any], old: bool) -> dict[str, Any]:
    """Select what must agree: resolved values, or typed options of the task in format 1."""
    own = {name: value for name, value in spec.items() if name not in ("format", "id", *TYPED)}
    if old:
        own = _first_format(own)
        typed = spec.get("set", {})
        own["set"] = {name: text for name, text in typed.items() if name.startswith("task.")}
    return own


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _flat(spec: Mapping[str, Any]) -> dict[str, Any]:
    tables = {name: value for name, value in spec.items() if isinstance(value, Mapping)}
    flat = {name: value for name, value in spec.items() if name not in tables}
    return flat | {f"{t}.{k}": v for t, values in tables.items() for k, v in values.items()}
