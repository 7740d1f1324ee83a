"""Summaries of a federation: examples per client and class, as text and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.data.federation import Federation
from fedexp.errors import UsageError

SHADES = " .:-=+*#%@"  # ASCII, for any terminal and log
TEXT_CLIENTS = 100
TEXT_ROWS = 20
BUBBLES = 100  # clients above which bubbles would overlap, and a heat map is drawn instead

Counts = NDArray[np.int64]


def class_counts(federation: Federation, classes: int) -> Counts:
    """Return the number of examples per client (row) and class (column)."""
    labels = federation.fields["y"].numpy()
    owner = np.repeat(np.arange(federation.clients), federation.sizes)
    flat = np.bincount(owner * classes + labels, minlength=federation.clients * classes)
    return flat.reshape(federation.clients, classes)


def describe(counts: Counts) -> list[str]:
    """Return summary statistics of a federation, one per line.

    >>> print(*describe(np.array([[3, 0], [1, 1]])), sep="\\n")
    clients             2
    examples            5
    classes             2
    client size         min 2, median 2.5, max 3
    classes per client  mean 1.50
    """
    sizes = counts.sum(axis=1)
    spread = f"min {sizes.min():,}, median {np.median(sizes):,.1f}, max {sizes.max():,}"
    values = {
        "clients": f"{len(counts):,}",
        "examples": f"{counts.sum():,}",
        "classes": str(counts.shape[1]),
        "client size": spread.replace(".0,", ","),
        "classes per client": f"mean {np.count_nonzero(counts, axis=1).mean():.2f}",
    }
    return [f"{name:<20}{value}" for name, value in values.items()]


def text_heat_map(counts: Counts) -> list[str]:
    """Return a text heat map: one column per client, one line per class or group of classes.

    At most 100 clients are shown. A darker character means more examples.

    >>> print(*text_heat_map(np.array([[9, 0], [0, 9], [5, 4]])), sep="\\n")
     0 |@ +|
     1 | @=|
    """
    per_line = -(-counts.shape[1] // TEXT_ROWS)
    starts = np.arange(0, counts.shape[1], per_line)
    grouped = np.add.reduceat(counts[:TEXT_CLIENTS], starts, axis=1)
    share = grouped / max(1, grouped.max())
    # A class that occurs at a client is never blank.
    shade = np.ceil(share * (len(SHADES) - 1)).astype(int)
    lines = ("".join(SHADES[level] for level in row) for row in shade.T)
    return [f"{start:>2} |{line}|" for start, line in zip(starts, lines, strict=True)]


def draw(counts: Counts, path: Path, title: str) -> None:
    """Draw clients x classes to an image file, in the format of its suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("drawing needs matplotlib: pip install 'fedexp[plots]'") from error
    clients, classes = counts.shape
    height = min(12.0, 2 + 0.22 * classes)
    figure = Figure(figsize=(12, height), layout="constrained")
    axes = figure.add_subplot()
    (_bubbles if clients <= BUBBLES else _heat_map)(axes, counts)
    axes.set(title=title, xlabel="client", ylabel="class")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot draw {path}: {error}") from error


def _bubbles(axes: Any, counts: Counts) -> None:
    client, label = np.nonzero(counts)
    share = counts[client, label] / counts.max()
    axes.scatter(client, label, s=120 * share, alpha=0.8, linewidths=0)
    axes.set(xlim=(-1, len(counts)), ylim=(counts.shape[1] - 0.4, -0.6))


def _heat_map(axes: Any, counts: Counts) -> None:
    share = counts / counts.sum(axis=1, keepdims=True)
    image = axes.imshow(share.T, aspect="auto", interpolation="nearest", cmap="magma_r")
    axes.figure.colorbar(image, label="share of the client's examples")
