"""The outcome of a search for people and programs: tables, the next command, plain values."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from fedexp.experiments.tables import format_value
from fedexp.studies.epsilon import EPS, Found
from fedexp.studies.grids import Point
from fedexp.studies.ledger import Tried
from fedexp.studies.trial import Scored, window_of
from fedexp.studies.tune import Study

TOP = 10
Table = tuple[list[str], list[list[str]]]


def best_table(studies: Sequence[tuple[Study, list[Tried]]], exact: bool = False) -> Table:
    """The best values of each algorithm; of a single one, its ten best points, or all if exact.

    `exact` is for programs: numbers in full, and nothing where there is none.
    """
    metric = studies[0][0].metric
    single = len(studies) == 1
    names = list(dict.fromkeys(name for study, _ in studies for name in study.values))
    test = metric.replace("train", "test")
    cells = []
    for study, tried in studies:
        for each in tried[: (len(tried) if exact else TOP) if single else 1]:
            turned = [_number(each.point.get(name), exact) for name in names]
            results = [_result(each.scored, metric, exact), _test(each.scored, test, exact)]
            cells.append([study.run.spec.algorithm, *turned, *results])
    return _without_empty(["algorithm", *names, _words(metric), f"last {_words(test)}"], cells)


def epsilon_table(study: Study, found: Found, exact: bool = False) -> Table:
    """The values that the rule of thumb went through."""
    test = study.metric.replace("train", "test")
    results = [_words(study.metric), f"last {_words(test)}"]
    cells = [
        [
            _number(eps, exact),
            _result(each, study.metric, exact),
            _test(each, test, exact),
            _number(each.step, exact),
        ]
        for eps, each in found.tried
    ]
    return _without_empty(["eps", *results, "median step size"], cells)


def heading(study: Study, count: int) -> str:
    """What was searched, and what the score is."""
    spec = study.run.spec
    first, last = window_of(study.run.rounds)
    kinds = {"paper": "grid", "free": "free search", "epsilon": "rule of thumb"}
    trials = f"{count} {'trial' if count == 1 else 'trials'} of {last} rounds, seed {spec.seed}"
    score = f"{study.metric.replace('train_', 'training ')}, mean of rounds {first} to {last}"
    return f"{spec.task}: {kinds[study.protocol]}, {trials}; score: {score}"


def next_command(study: Study, point: Point) -> str:
    """The command that trains with these values; the rounds are those of the task."""
    spec = study.run.spec
    words = ["fedexp", "run", spec.task, "--algorithm", spec.algorithm]
    for flag, value, usual in (("--mode", spec.mode, "paper"), ("--seed", str(spec.seed), "0")):
        words += [flag, value] if value != usual else []
    pairs = {**dict(spec.options), **{name: _exact(value) for name, value in point.items()}}
    for name, value in pairs.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def remarks(study: Study, tried: Sequence[Tried]) -> list[str]:
    """What a reader of the best values should know: how many failed, and where the grid ends."""
    diverged = sum(each.scored.diverged_at is not None for each in tried)
    pruned = sum(each.scored.pruned for each in tried)
    lines = [f"{diverged} of {len(tried)} trials diverged"] if diverged else []
    lines += [f"{pruned} of {len(tried)} trials were given up early"] if pruned else []
    for name, value in tried[0].point.items():
        ends = study.values[name]
        if study.protocol == "paper" and len(ends) > 1 and value in (min(ends), max(ends)):
            side = "smallest" if value == min(ends) else "largest"
            lines.append(f"{name}={_number(value)} is the {side} of the grid; look beyond it")
    return lines


def as_json(study: Study, tried: Sequence[Tried], best: Point) -> dict[str, Any]:
    """Everything, as plain values."""
    return {
        "algorithm": study.run.spec.algorithm,
        "best": best,
        "next": next_command(study, best),
        "trials": [{"values": each.point, **_plain(each.scored)} for each in tried],
    }


def epsilon_trials(found: Found) -> list[Tried]:
    """What the rule of thumb tried, as points."""
    return [Tried({EPS: eps}, scored) for eps, scored in found.tried]


def _without_empty(headers: list[str], cells: list[list[str]]) -> Table:
    """A task without test data needs no column for it."""
    kept = [k for k in range(len(headers)) if any(row[k] != "-" for row in cells)]
    return [headers[k] for k in kept], [[row[k] for k in kept] for row in cells]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _plain(scored: Scored) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in vars(scored).items()}  # fmt: skip


def _result(scored: Scored, metric: str, exact: bool) -> str:
    if scored.diverged_at is not None or scored.pruned:
        return "" if exact else "given up" if scored.pruned else "diverged"
    return _exact(scored.score) if exact else format_value(scored.score, metric)


def _test(scored: Scored, metric: str, exact: bool) -> str:
    if scored.test is None or scored.diverged_at is not None:
        return "-"
    return _exact(scored.test) if exact else format_value(scored.test, metric)


def _number(value: float | None, exact: bool = False) -> str:
    return "" if value is None else _exact(value) if exact else f"{value:.3g}"


def _exact(value: float) -> str:
    """As short as it can be said without becoming another number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
