"""Filters of a report: which of the stored runs it shows.

A filter is an option of `fedexp report` and an argument of `write_report`. All of them must accept
a run. `Filters.select` counts what each removed, and an empty selection is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

from fedexp.errors import UsageError, require, unknown_name
from fedexp.runs import StoredRun

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
MOST_DAYS = 36500  # that --since goes back


@dataclass(frozen=True)
class Filters:
    """Conditions on stored runs; an empty one accepts every run.

    Args:
        algorithms: names, or references such as `study.py:mine`.
        tasks: names, or references such as `study.py:task`.
        rounds: numbers of rounds that runs were given, "500" or "100-500".
        since: only runs that were started then or later: "2h" or "3d" ago, or a date or a time in
            ISO 8601; a time without a zone is local.
        exclude: patterns of run ids or folder names, as a shell has them: "*-s3-*".
    """

    algorithms: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()
    since: str | None = None
    exclude: tuple[str, ...] = ()

    def select(self, runs: Sequence[StoredRun]) -> Selection:
        """Return the runs that all filters accept, and how many each of them removed.

        Raises:
            UsageError: for a name that no run has, and if no run is left.
        """
        self._check_names(runs)
        left, removed = list(runs), {}
        for text, accepts in self._conditions():
            before, left = left, [run for run in left if accepts(run)]
            removed[text] = len(before) - len(left)
        counts = [(text, number) for text, number in removed.items() if number]
        by_filter = ", ".join(f"{text} removed {number}" for text, number in counts)
        require(
            bool(left) or not runs,
            f"no run is left of {len(runs)}: {by_filter}; drop a filter, or widen it",
        )
        left_out = ", ".join(f"{number} by {text}" for text, number in counts)
        idle = [t for t, number in removed.items() if not number and t.startswith("--exclude")]
        return Selection(left, f"left out {left_out}" if left_out else "", idle)

    def _conditions(self) -> Iterator[tuple[str, Callable[[StoredRun], bool]]]:
        """Yield each filter as the option that sets it, and whether it accepts a run."""
        for kind, names in self._names():
            if names:
                yield f"--{kind} {','.join(names)}", partial(_is_named, kind, names)
        if self.rounds:
            ranges = [_range(text) for text in self.rounds]
            accepted = f"--rounds {','.join(self.rounds)}"
            yield accepted, lambda run: any(a <= run.spec["rounds"] <= b for a, b in ranges)
        if self.since is not None:
            yield f"--since {self.since}", partial(_is_since, parse_since(self.since))
        for pattern in self.exclude:
            yield f"--exclude {pattern}", partial(_differs, pattern)

    def _names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return ("task", self.tasks), ("algorithm", self.algorithms)

    def _check_names(self, runs: Sequence[StoredRun]) -> None:
        for kind, names in self._names():
            for name in names:
                if runs and not any(_is_named(kind, [name], run) for run in runs):
                    raise unknown_name(kind, name, {run.spec[kind] for run in runs})


class Selection(NamedTuple):
    """The runs that filters left.

    Attributes:
        runs: in their order.
        left_out: what was removed, e.g. "left out 3 by --rounds 500"; empty if nothing was.
        idle: patterns that match no run: probably mistyped.
    """

    runs: list[StoredRun]
    left_out: str
    idle: list[str]


def parse_since(text: str, now: datetime | None = None) -> datetime:
    """Return the time that a text names, with its zone.

    >>> parse_since("2h", datetime.fromisoformat("2026-11-16T10:00+00:00")).isoformat()
    '2026-11-16T08:00:00+00:00'
    >>> parse_since("2026-11-01T12:00+00:00").isoformat()
    '2026-11-01T12:00:00+00:00'
    """
    ago = re.fullmatch(r"(\d+(?:\.\d+)?) *([mhdw])", text.strip())
    if ago:
        period = timedelta(**{UNITS[ago[2]]: min(float(ago[1]), 1e6)})
        return (now or datetime.now().astimezone()) - min(period, timedelta(days=MOST_DAYS))
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since {text} is not a time; write 2h, 3d, 2026-11-01 or 2026-11-01T08:30"
        ) from None


def _range(text: str) -> tuple[int, int]:
    """Parse "500" or "100-500".

    >>> _range("500"), _range("100-500")
    ((500, 500), (100, 500))
    """
    first, dash, last = text.partition("-")
    require(
        first.strip().isdecimal() and (not dash or last.strip().isdecimal()),
        f"--rounds {text} is not a number of rounds; write 500 or 100-500",
    )
    low, high = int(first), int(last) if dash else int(first)
    require(low <= high, f"--rounds {text} is empty; write {high}-{low}")
    return low, high


def _is_named(kind: str, wanted: Sequence[str], run: StoredRun) -> bool:
    """Return whether the task or the algorithm of a run has a wanted name or reference."""
    source = str(run.spec.get(f"{kind}_source") or "")
    return not {run.spec[kind], source, source.rpartition("/")[2]}.isdisjoint(wanted)


def _is_since(earliest: datetime, run: StoredRun) -> bool:
    """Return whether a run was started then or later; False where that is not recorded."""
    try:
        return datetime.fromisoformat(str(run.environment.get("started"))).astimezone() >= earliest
    except (ValueError, OverflowError):
        return False


def _differs(pattern: str, run: StoredRun) -> bool:
    """Return whether neither the id nor the folder of a run matches a pattern."""
    names = (str(run.spec.get("id", "")), run.folder.name)
    return not any(fnmatchcase(name, pattern) for name in names)
