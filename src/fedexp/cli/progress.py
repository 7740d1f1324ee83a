"""A live bar on stderr: round, loss, accuracy, server step size, time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SHOWN = {  # the numbers beside the bar: the first name of each that a round has
    ("train_loss",): "loss {:.3g}",
    ("test_accuracy", "train_accuracy"): "accuracy {:.2%}",
    ("server_lr",): "step {:.3g}",
}


class Bar(Protocol):
    """Tell it about every round."""

    def __call__(self, row: dict[str, Any]) -> None: ...


def describe(row: dict[str, Any]) -> str:
    """The numbers of a round in a few words.

    >>> describe({"round": 3, "train_loss": 0.25, "server_lr": 1.5})
    'loss 0.25  step 1.5'
    """
    known = {name: value for name, value in row.items() if value is not None}
    first = ((next((n for n in names if n in known), None), text) for names, text in SHOWN.items())
    return "  ".join(text.format(known[name]) for name, text in first if name)


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Bar]:
    """A bar over `total` rounds. Where stderr is not a terminal nothing is drawn."""
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
        bar = p.add_task(title, total=total, numbers="")
        latest: dict[str, Any] = {}

        def on_round(row: dict[str, Any]) -> None:
            # rounds between evaluations carry no loss: keep showing the last one
            latest.update({name: value for name, value in row.items() if value is not None})
            p.update(bar, advance=1, numbers=describe(latest))

        yield on_round
