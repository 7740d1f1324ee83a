"""`Setup`: an algorithm with its local training, and the options that change them by name.

A mistake is one line that offers the nearest name.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from torch import Tensor

from fedexp.algorithms import Algorithm, default_eps
from fedexp.errors import DataNote, UsageError, require, unknown_name
from fedexp.local import LocalTraining
from fedexp.server import ExP, ServerRule
from fedexp.tasks.task import Weighting
from fedexp.text import convert, option_text

EPS = ("server.eps", "server.eps_mode")  # a number and its unit
SECTIONS = ("server", "client", "local")
OVER_ROUNDS = ("linear", "cosine")  # schedules that depend on the number of rounds
LEFT_OUT = {  # of a spec, where an option has this value: ids are those of runs without it
    "bound": None,
    "server_schedule": "constant",
    "server.nesterov": False,
    "local.keep_state": False,
    "local.step_schedule_over": "round",
    "local.warmup_steps": 0,
}


@dataclass(frozen=True)
class Setup:
    """An algorithm, its local training and its client weights: what the options of a run change.

    Options have dotted names: `server.eps`, `client.mu`, `local.lr`, and plain `average_last`,
    `weighting`, `bound` and `server_schedule`. A name without a dot is an option of the server
    rule, the client rule or local training, and refused where several have it; `lr` is always the
    server's.
    """

    algorithm: Algorithm
    local: LocalTraining
    weighting: Weighting = "uniform"

    def section(self, name: str) -> Any:
        """Return the dataclass that holds the options of a section."""
        found = self.local if name == "local" else getattr(self.algorithm, name)
        require(
            dataclasses.is_dataclass(found),
            f"{type(found).__name__} is not a dataclass; put @dataclass(frozen=True) above it, its "
            "fields are its options",
        )
        return found

    def options(self) -> dict[str, Any]:
        """Return the options of a spec, by dotted name: all but those that are not used."""
        every = self.all_options()
        return {n: value for n, value in every.items() if n not in LEFT_OUT or value != LEFT_OUT[n]}

    def all_options(self) -> dict[str, Any]:
        """Return every option with its value, by dotted name."""
        found = {
            f"{section}.{field.name}": getattr(self.section(section), field.name)
            for section in SECTIONS
            for field in dataclasses.fields(self.section(section))
        }
        others = {"average_last": self.algorithm.iterates, "weighting": self.weighting}
        shared = {name: getattr(self.algorithm, name) for name in ("bound", "server_schedule")}
        return {**found, **others, **shared}

    def init_client_state(self, params: Tensor) -> dict[str, Tensor]:
        """Return a client's state before its first round."""
        return self.algorithm.init_client_state(params, self.local)

    def schedules_over_rounds(self) -> list[str]:
        """Return the schedules whose factors depend on the number of rounds."""
        local, names = self.local, ("local.lr_schedule", "server_schedule")
        values = local.lr_schedule, self.algorithm.server_schedule
        found = [f"{n} {v!r}" for n, v in zip(names, values, strict=True) if v in OVER_ROUNDS]
        over_run = local.step_schedule_over == "run" and local.step_schedule != "constant"
        return [*found, "local.step_schedule_over 'run'"] if over_run else found

    def with_options(self, options: Mapping[str, Any]) -> Setup:
        """Return a copy with options changed; they are checked together, and text is converted.

        >>> from fedexp.algorithms import fedexp
        >>> Setup(fedexp(), LocalTraining()).with_options({"eps": "0.5"}).algorithm.server.eps
        0.5

        Of an option that is given twice, by its short and its dotted name, the last value counts.
        Local steps replace epochs, and epochs steps; both together are refused.
        An eps has the mode that the rule has, and an eps_mode without an eps that mode's default
        where the rule's own eps has another unit: a number never changes its unit.
        """
        changes: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
        for key, value in options.items():
            full, parsed = self.parse(key, value)
            section, _, field = full.rpartition(".")
            changes[section][field] = parsed
        of_local = changes["local"]
        for name, other in (("steps", "epochs"), ("epochs", "steps")):
            if of_local.get(name) is not None:  # it replaces the task's
                of_local.setdefault(other, None)
        changes["server"] |= _eps_of_mode(self.algorithm.server, changes["server"])
        weighting = changes[""].pop("weighting", self.weighting)
        changed = {
            name: replace(self.section(name), **changes[name]) for name in SECTIONS if changes[name]
        }
        local = changed.pop("local", self.local)
        return Setup(replace(self.algorithm, **changed, **changes[""]), local, weighting)

    def changes_from(self, before: Setup) -> dict[str, str]:
        """Return the options that another setup has with other values, as `--set` takes them."""
        usual, options = before.all_options(), self.all_options()
        changed = {name for name, value in options.items() if usual.get(name) != value}
        if changed & set(EPS):
            changed |= set(EPS) & options.keys()
        return {name: option_text(value) for name, value in options.items() if name in changed}

    def parse(self, key: str, value: Any) -> tuple[str, Any]:
        """Return the dotted name of an option and the value as its type."""
        full = self.full_name(key)
        section, _, field = full.rpartition(".")
        owners = (type(self.section(section)),) if section else (Setup, Algorithm)
        hints = [get_type_hints(owner).get(field) for owner in owners]
        return full, convert(value, next(filter(None, hints)), full)

    def names_of(self, key: str) -> list[str]:
        """Return the dotted names that a name may stand for: none for an unknown one."""
        names = self.all_options()
        sections = ("server",) if key == "lr" else SECTIONS
        return [name for name in (key, *(f"{s}.{key}" for s in sections)) if name in names]

    def full_name(self, key: str) -> str:
        """Return the dotted name of an option; raise `UsageError` unless there is exactly one."""
        names = self.names_of(key)
        require(
            len(names) < 2,
            f"{self.algorithm.name} has {' and '.join(names)}; write which one instead of {key}",
        )
        if names:
            return names[0]
        if key == "lr":
            raise UsageError(
                f"{self.algorithm.name} has no server lr; for the clients' use local.lr"
            )
        options = set(self.all_options())
        short = {name.rpartition(".")[2] for name in options}
        raise unknown_name(f"option of {self.algorithm.name}", key, {*options, *short})


def _eps_of_mode(server: ServerRule, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the eps of a mode that is given without one, if the rule's own has another unit."""
    mode = changes.get("eps_mode")
    if not isinstance(server, ExP) or mode is None or "eps" in changes or server.eps == 0:
        return {}
    same_unit = (mode == "relative") == (server.eps_mode == "relative")
    return {} if same_unit else {"eps": default_eps(mode)}


def share_options(
    setups: Mapping[str, Setup], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the options of each algorithm: `name:key` is for one, `key` for all that have it.

    A note names the algorithms without an option that others have. A name that no algorithm has
    raises the error of the first algorithm. Steps for one replace epochs for all, and epochs steps.
    """
    shared: dict[str, dict[str, Any]] = {name: {} for name in setups}
    specific: dict[str, dict[str, Any]] = {name: {} for name in setups}
    general_first = sorted(options.items(), key=lambda option: ":" in option[0])
    for key, value in general_first:
        name, colon, own = key.partition(":")
        if colon and name not in setups:
            raise unknown_name(f"algorithm in option {key}", name, setups)
        takers = [name] if colon else [n for n, s in setups.items() if s.names_of(key)]
        for taker in takers or list(setups)[:1]:
            full, parsed = setups[taker].parse(own if colon else key, value)  # raises if unknown
            (specific if colon else shared)[taker][own if colon else key] = value
            other = {"local.steps": "epochs", "local.epochs": "steps"}.get(full)
            if colon and other and parsed is not None:
                for general in (other, f"local.{other}"):
                    shared[taker].pop(general, None)
        others = ", ".join(n for n in setups if n not in takers)
        if not colon and others:
            full = " or ".join(sorted({setups[n].full_name(key) for n in takers}))
            note = f"option {key} is {full} of {', '.join(takers)}; it has no effect on {others}"
            warnings.warn(note, DataNote, stacklevel=4)
    for name, setup in setups.items():
        shared[name] |= specific[name]
        try:
            setup.with_options(shared[name])
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    return shared


def split_task_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate `task.*` options (arguments of the task) from all others."""
    prefix = "task."
    of_task = {k.removeprefix(prefix): v for k, v in options.items() if k.startswith(prefix)}
    return of_task, {k: v for k, v in options.items() if not k.startswith(prefix)}
