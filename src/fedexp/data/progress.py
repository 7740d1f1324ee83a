"""A progress bar on stderr for the few things that take longer than a breath."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def progress(
    what: str, total: int | None, unit: str = "", show: bool | None = None
) -> Iterator[Advance]:
    """Show a bar while the block runs; call what it gives with the amount done since last time.

    Args:
        what: said before the bar.
        total: the amount that is all of it, or None where nobody knows.
        unit: what is counted; "bytes" is shown as kB, MB and so on.
        show: whether to draw at all; by default only where stderr is a terminal.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    visible = sys.stderr.isatty() if show is None else show
    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done: bars.advance(task, done)
