"""Progress on stderr: a live bar with the time left, or plain lines for a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SHOWN = {  # the numbers beside the bar: of each, the first name that a row has
    ("train_loss",): "loss {:.3g}",
    ("test_accuracy", "train_accuracy"): "accuracy {:.2%}",
    ("server_lr",): "step {:.3g}",
}

LINES = 20  # of a log, per run
Row = dict[str, Any]


class Bar(Protocol):
    """Called with every row, and with the name of its run where several train at a time."""

    def __call__(self, row: Row, name: str = "") -> None: ...

    def skip(self, rounds: int) -> None:
        """Skip rounds that were done before; they do not enter the estimate of the time left."""


@contextmanager
def watch(title: str, rounds: int, runs: int = 1, quiet: bool = False) -> Iterator[Bar]:
    """Show a bar over all rounds of all runs, or print lines if `quiet`.

    Where stderr is not a terminal the bar is not drawn.
    """
    if quiet:
        yield LogLines(rounds)
        return
    with progress_bar(title, rounds * runs) as bar:
        yield bar


def describe(row: dict[str, Any]) -> str:
    """Return the main numbers of a row as text.

    >>> describe({"round": 3, "train_loss": 0.25, "server_lr": 1.5})
    'loss 0.25  step 1.5'
    """
    known = {name: value for name, value in row.items() if value is not None}
    first = ((next((n for n in names if n in known), None), text) for names, text in SHOWN.items())
    return "  ".join(text.format(known[name]) for name, text in first if name)


class LogLines:
    """Prints about twenty lines per run, and one for its last round."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._every = rounds, max(1, rounds // LINES)
        self._latest: dict[str, Row] = {}

    def __call__(self, row: Row, name: str = "") -> None:
        known = _updated(self._latest.setdefault(name, {}), row)
        if row["round"] % self._every == 0 or row["round"] == self._rounds:
            head = f"{name} " if name else ""
            line = f"{head}round {row['round']}/{self._rounds}  {describe(known)}"
            print(line.rstrip(), file=sys.stderr, flush=True)

    def skip(self, rounds: int) -> None:
        """Do nothing: lines have no estimate."""


class LiveBar:
    """A progress bar of rich; one task for all runs."""

    def __init__(self, progress: Any, title: str, total: int) -> None:
        self._progress, self._latest = progress, dict[str, Any]()
        self._task = progress.add_task(title, total=total, numbers="")

    def __call__(self, row: Row, name: str = "") -> None:
        numbers = describe(_updated(self._latest, row))
        self._progress.update(self._task, advance=1, numbers=numbers)

    def skip(self, rounds: int) -> None:
        self._progress.update(self._task, completed=rounds)


def _updated(latest: Row, row: Row) -> Row:
    """Merge a row: rounds between evaluations have no loss, so the last one stays."""
    latest.update({name: value for name, value in row.items() if value is not None})
    return latest


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Bar]:
    """Show a bar over `total` rounds; draws nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        yield LiveBar(p, title, total)
