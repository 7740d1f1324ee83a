"""`Setup`: everything about a run that is not the task; options by name; the two modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedexp.algorithms import Algorithm
from fedexp.errors import UsageError, unknown_name
from fedexp.experiments.values import convert, hints_of
from fedexp.local import LocalTraining
from fedexp.server import Adagrad, Adam, ExP, MomentumExP, ServerRule, Yogi
from fedexp.tasks.task import Task, Weighting

Mode = Literal["paper", "authors-code"]
SECTIONS = ("server", "client", "local")


@dataclass(frozen=True)
class Setup:
    """An algorithm, its local training and its weights: what the options of a run change.

    Options have dotted names: `server.eps`, `client.mu`, `local.lr`, and plain `average_last` and
    `weighting`. A name without a dot is looked up in the server rule, the client rule and local
    training, in this order; `lr` is always the server's.
    """

    algorithm: Algorithm
    local: LocalTraining
    weighting: Weighting = "uniform"

    def section(self, name: str) -> Any:
        """The dataclass behind a section."""
        return self.local if name == "local" else getattr(self.algorithm, name)

    def options(self) -> dict[str, Any]:
        """Every option with its value, by dotted name."""
        found = {
            f"{section}.{field.name}": getattr(self.section(section), field.name)
            for section in SECTIONS
            for field in dataclasses.fields(self.section(section))
        }
        return {**found, "average_last": self.algorithm.iterates, "weighting": self.weighting}

    def with_option(self, key: str, value: Any) -> Setup:
        """A copy with one option changed; text is converted to the option's type.

        >>> from fedexp.algorithms import fedexp
        >>> Setup(fedexp(), LocalTraining()).with_option("eps", "0.5").algorithm.server.eps
        0.5
        """
        full = self.full_name(key)
        section, _, field = full.rpartition(".")
        if section == "":
            return self._with_plain(field, value)
        part = self.section(section)
        hint = hints_of(type(part))[field]
        changed = replace(part, **{field: convert(value, hint, full)})
        if section == "local":
            return replace(self, local=changed)
        return replace(self, algorithm=replace(self.algorithm, **{section: changed}))

    def with_options(self, options: Mapping[str, Any]) -> Setup:
        setup = self
        for key, value in options.items():
            setup = setup.with_option(key, value)
        return setup

    def _with_plain(self, field: str, value: Any) -> Setup:
        if field == "weighting":
            return replace(self, weighting=convert(value, Weighting, field))
        last = convert(value, int, field)
        return replace(self, algorithm=replace(self.algorithm, average_last=last))

    def has_option(self, key: str) -> bool:
        """Whether `with_option` knows the name."""
        try:
            return bool(self.full_name(key))
        except UsageError:
            return False

    def full_name(self, key: str) -> str:
        """The dotted name of an option; raises `UsageError` for one that does not exist."""
        known = self.options()
        candidates = [key, *(f"{section}.{key}" for section in SECTIONS)]
        for name in candidates:
            if name in known and (key, name) != ("lr", "local.lr"):
                return name
        if key == "lr":
            raise UsageError(
                f"{self.algorithm.name} has no server lr; for the clients' say local.lr"
            )
        short = {name.rpartition(".")[2] for name in known}
        raise unknown_name(f"option of {self.algorithm.name}", key, {*known, *short})


def paper_setup(task: Task, algorithm: Algorithm) -> Setup:
    """The paper's form of an algorithm, with its best values for the task."""
    tuned = task.tuned.get(algorithm.name, {})
    return Setup(algorithm, task.local).with_options(tuned)


def authors_code(task: Task, algorithm: Algorithm) -> Setup:
    """What the authors' released code does: the deviations of audit section B, on purpose.

    eps times the participants (B1), eps decayed by the square of the step-size decay (B2), both
    decays before the first round (B3), weights by data size (B5), FedExP-M without its momentum
    (B6), their own forms of FedAdagrad and FedAdam (B8, B9), and the task's released values. Not
    the accidents of a script: one round more than asked for (B4), NaN for a zero update (B22).
    """
    setup = paper_setup(task, algorithm)
    local = replace(setup.local, decay_before_first_round=True)
    server = _released_rule(setup.algorithm.server, local.lr_decay)
    released = Setup(replace(setup.algorithm, server=server), local, "size")
    return released.with_options(task.released.get(algorithm.name, {}))


def setup_for(task: Task, algorithm: Algorithm, mode: str) -> Setup:
    """The setup of a mode by its name."""
    modes = {"paper": paper_setup, "authors-code": authors_code}
    if mode not in modes:
        raise unknown_name("mode", mode, modes)
    return modes[mode](task, algorithm)


def _released_rule(server: ServerRule, lr_decay: float) -> ServerRule:
    if isinstance(server, ExP):
        server = replace(
            server,
            eps_mode="participants",
            eps_decay=lr_decay**2,
            decay_before_first_round=True,
        )
    if isinstance(server, MomentumExP):
        return replace(server, apply_momentum=False)
    if isinstance(server, Yogi):
        return server  # not in the released code
    if isinstance(server, Adagrad):
        return replace(server, form="authors", tau=0.01)
    if isinstance(server, Adam):
        return replace(server, form="authors", tau=1e-4)
    return server


def share_options(
    setups: Mapping[str, Setup], options: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Which options go to which algorithm: `name:key` to one, `key` to all that have it.

    A name that no algorithm knows is a mistake, and is told as the first algorithm tells it.
    """
    shared: dict[str, dict[str, str]] = {name: {} for name in setups}
    general_first = sorted(options.items(), key=lambda option: ":" in option[0])
    for key, value in general_first:
        name, colon, own = key.partition(":")
        if colon and name not in setups:
            raise unknown_name("algorithm in --set", name, setups)
        takers = [name] if colon else [n for n, s in setups.items() if s.has_option(key)]
        for taker in takers or list(setups)[:1]:
            setups[taker].with_option(own if colon else key, value)  # a mistake shows here
            shared[taker][own if colon else key] = value
    return shared


def split_task_options(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Separate `task.*` options (arguments of the task) from the others."""
    prefix = "task."
    mine = {k.removeprefix(prefix): v for k, v in options.items() if k.startswith(prefix)}
    return mine, {k: v for k, v in options.items() if not k.startswith(prefix)}


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """`["eps=0.1"]` to `{"eps": "0.1"}`."""
    pairs: dict[str, str] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not (equals and key and value):
            raise UsageError(f"--set takes key=value, not {text!r}; for example --set eps=0.01")
        pairs.pop(key.strip(), None)  # said again, it counts from here on
        pairs[key.strip()] = value.strip()
    return pairs
