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

FORMAT = 1
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
    found = spec.get("format")
    require(
        found == FORMAT,
        f"{path} has format {shown(found)}, this fedexp reads {FORMAT}; use the other one",
    )
    own = {name: value for name, value in spec.items() if name not in ("format", "id")}
    require(
        own.keys() >= {"task", "algorithm", "seed"} and spec.get("id") == id_of(own),
        f"{path} has been changed since the run began; put it back, or start another run",
    )
    fault = spec_fault(own)
    require(fault is None, f"{path} is not the spec of a run: {fault}; start another run")
    return spec


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
    now = _flat(wanted)
    then = _flat({name: value for name, value in spec.items() if name not in ("format", "id")})
    changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    if changed:
        name = changed[0]
        raise UsageError(
            f"{folder} holds another run: there {shown(name)} is {shown(then.get(name))}, here it "
            f"is {now.get(name)}; choose another folder"
        )


def id_of(spec: Mapping[str, Any]) -> str:
    """The id of a frozen spec."""
    text = json.dumps(spec, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{spec['task']}-{spec['algorithm']}-s{spec['seed']}-{digest}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _flat(spec: Mapping[str, Any]) -> dict[str, Any]:
    tables = {name: value for name, value in spec.items() if isinstance(value, Mapping)}
    flat = {name: value for name, value in spec.items() if name not in tables}
    return flat | {f"{t}.{k}": v for t, values in tables.items() for k, v in values.items()}
