"""`spec.toml`, the one text of an experiment, and `Outcome`, the result of a run.

The resolved spec, with all options, is what `spec.toml` stores, and the id of a run is a digest of
it. The file is accepted back, as it was stored or with a copy edited: `read_experiment`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedexp.engine import SimulationState
from fedexp.errors import UsageError, check_name, require, shown
from fedexp.experiment import FIELDS, Experiment, Row
from fedexp.plain import SOURCES, TYPED, flat, id_of
from fedexp.storage import parse_toml

FORMAT = 2
SPEC, TRIALS = "spec.toml", "trials"  # in a run folder, and in the folder of all runs
PRUNED = "pruned"  # status of a trial that was stopped early
HEAD = "# A run of fedexp, frozen. Continue it with: fedexp resume THIS-FOLDER\n"
RESOLVED = ("clients", "changed", "arguments", "options", "start")  # follow from the others
OnRound = Callable[[Experiment, Row], None]
Differences = dict[str, tuple[Any, Any]]  # by name, the value of each of two specs


@dataclass(frozen=True)
class Outcome:
    """The result of a run: one row of numbers per round, and how it ended.

    Attributes:
        spec: the resolved spec of the run, as plain values.
        rows: one per round.
        seconds: training time, over all processes that worked on the run.
        diverged_at: the round in which the run diverged, if it did.
        status: "finished", "diverged", "target" for one that stopped there, "pruned"
            for a trial that was worse than others, or "unfinished".
        reason: what diverged.
        folder: the run folder; None where nothing is stored.
        stored: number of rounds that were stored before.
        state: the last state of a run that is not stored; None otherwise.
    """

    spec: Mapping[str, Any]
    rows: list[Row]
    seconds: float
    diverged_at: int | None = None
    status: str = "finished"
    reason: str = ""
    folder: Path | None = None
    stored: int = 0
    state: SimulationState | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, spec: Mapping[str, Any], rows: list[Row], result: Mapping[str, Any], **more: Any
    ) -> Outcome:
        """Return the outcome of a run with this spec, rows and content of `result.json`."""
        return cls(
            spec,
            rows,
            result.get("seconds", sum(row.get("seconds", 0.0) for row in rows)),
            result.get("diverged_at"),
            result.get("status", "unfinished"),
            result.get("reason", ""),
            **more,
        )

    @property
    def algorithm(self) -> str:
        """The name of the algorithm."""
        return str(self.spec["algorithm"])

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.spec["seed"])

    def curve(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return one number per round, NaN where it was not evaluated."""
        values = [row.get(name) for row in self.rows]
        numbers = [value if isinstance(value, int | float) else np.nan for value in values]
        return np.array(numbers, dtype=np.float64)


def folder_of(experiment: Experiment, root: Path) -> Path:
    """Return the folder of a run under `root`."""
    return root / experiment.id


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run: `spec.toml` is written first."""
    return (path / SPEC).is_file()


def spec_text(spec: Mapping[str, Any], head: str = HEAD) -> str:
    """Return the text of `spec.toml` for a resolved spec."""
    return head + tomli_w.dumps({"format": FORMAT, "id": id_of(spec), **spec})


def without_id(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved spec without what `spec.toml` adds to it."""
    return {name: value for name, value in spec.items() if name not in ("format", "id")}


def read_spec(folder: Path) -> dict[str, Any]:
    """Return the content of `spec.toml`; refuse one that is damaged, edited or newer than this."""
    path = folder / SPEC
    try:
        spec = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{folder} is not a run: cannot read {SPEC}: {error.strerror}; name a run folder"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{path} is damaged: {shown(error)}; remove {folder}, and run it again"
        ) from None
    check_format(spec, path)
    resolved = without_id(spec)
    require(
        resolved.keys() >= {"task", "algorithm", "seed"} and spec.get("id") == id_of(resolved),
        f"{path} has been changed since the run began; put it back, or start another run",
    )
    if (fault := spec_fault(resolved)) is not None:
        raise UsageError(f"{path} is not the spec of a run: {fault}; start another run")
    return spec


def check_format(spec: Mapping[str, Any], path: Path) -> None:
    """Refuse a spec of a format that this version does not read."""
    number = spec.get("format")
    require(
        type(number) is int and number == FORMAT,
        f"{path} has format {shown(number)}; this fedexp reads format {FORMAT}",
    )


def spec_fault(spec: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a resolved spec; None if nothing is."""
    try:
        experiment = Experiment.of(spec)
    except (UsageError, LookupError, TypeError) as error:
        return str(error)
    kinds = {"task": str, "algorithm": str, "options": dict, "set": dict, "clients": int}
    values = {"clients": 0, **spec}
    for name, kind in kinds.items():
        if not isinstance(values.get(name), kind):
            return f"{name} is {shown(spec.get(name, 'missing'))}"
    plain = (*spec["set"].values(), *(spec.get(name, "") for name in SOURCES))
    if not all(isinstance(text, str) for text in plain):
        return "set holds something other than text"
    missing = experiment.rounds is None or experiment.evaluate_every is None
    return "it has no rounds or evaluations" if missing else None


def read_experiment(path: Path) -> Experiment:
    """Return the experiment that a TOML file describes: a `spec.toml`, or one written by hand.

    Options are in its table `set`, or in tables in it. A reference to code (`study.py:task`) is
    imported when the experiment is used. What follows from the rest may be there, but must agree
    with it.
    """
    try:
        spec = without_id(parse_toml(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {shown(error)}") from None
    names = (*(set(FIELDS) - {"local", "weighting"}), *TYPED, *RESOLVED)
    for name in spec:
        check_name(f"name in {path}", name, names)
    require(spec.keys() & {"task", "task_source"} != set(), f"{path} names no task")
    spec = {"task": "", "algorithm": "fedexp", **spec}
    options = spec.get("set", {})
    require(isinstance(options, Mapping), f"set in {path} is not a table of options")
    experiment = Experiment.of({**spec, "set": flat(options)})
    stale = {name: spec[name] for name in RESOLVED if name in spec and name != "changed"}
    wrong = stale and differing(stale, {name: experiment.spec.get(name) for name in stale})
    if wrong:
        raise UsageError(
            f"{path} has {wrong}, which does not follow from the rest; write options in its table "
            "set, or remove it"
        )
    return experiment


def check_same(
    spec: Mapping[str, Any],
    wanted: Mapping[str, Any],
    folder: Path,
    may_change: Collection[str] = (),
) -> Differences:
    """Refuse to continue a run as another one: an option may have changed its default since.

    Returns the differences that are accepted.

    Args:
        spec: of the folder.
        wanted: of the run that is to be continued there.
        folder: of the run.
        may_change: names whose values may differ, dotted for those in tables; the name of a table
            covers all of it.
    """
    left_out = ("format", "id", *TYPED)
    then, now = ({n: v for n, v in each.items() if n not in left_out} for each in (spec, wanted))
    accepted = tuple(f"{name}." for name in may_change)
    changes = differences(then, now)
    for name, (there, here) in changes.items():
        require(
            f"{name}.".startswith(accepted),
            f"{folder} holds another run: there {shown(name)} is {shown(there)}, here it is "
            f"{here}; choose another folder",
        )
    return changes


def differences(spec: Mapping[str, Any], other: Mapping[str, Any]) -> Differences:
    """Return both values of each name whose values differ, dotted for those in tables."""
    one, two = flat(spec), flat(other)
    pairs = {name: (one.get(name), two.get(name)) for name in sorted(one.keys() | two.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def differing(spec: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first name whose values differ, see `differences`; None if none does."""
    return next(iter(differences(spec, other)), None)
