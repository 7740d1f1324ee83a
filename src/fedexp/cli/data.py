"""`fedexp data`: list, fetch, verify and show data sets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.analysis.plots import check_writable, label, new_figure, save
from fedexp.data import partition
from fedexp.data.datasets import DATASETS, Dataset, RawSplits, find
from fedexp.data.federation import Federation
from fedexp.data.sources import cache
from fedexp.data.sources.download import cache_path, check_archive, data_folder, fetch
from fedexp.data.sources.shakespeare import PAD, decode
from fedexp.errors import UsageError
from fedexp.seeding import generator

SHADES = " .:-=+*#%@"  # ASCII, for any terminal and log
TEXT_CLIENTS = 100
TEXT_ROWS = 20
LARGEST = 5  # clients of a text data set that are listed
BUBBLES = 100  # clients above which bubbles would overlap, and a heat map is drawn instead

Counts = NDArray[np.int64]


def run(args: argparse.Namespace) -> int:
    """Run a sub-command of `fedexp data`."""
    actions = {
        "list": list_datasets,
        "fetch": fetch_dataset,
        "verify": verify_dataset,
        "show": show_dataset,
    }
    return actions[args.action](args)


def list_datasets(args: argparse.Namespace) -> int:
    """Print one line per data set."""
    folder = data_folder(args.folder)
    print(f"data folder: {folder}")
    print(f"{'name':<12}{'classes':>8}{'train':>9}{'test':>8}  {'download':>9}  here")
    for name, dataset in DATASETS.items():
        source = dataset.source
        train, test = source.examples
        size = "?" if source.size is None else f"{source.size / 1e6:,.0f} MB"
        here = ", ".join(dataset.present(folder)) or "no"
        print(f"{name:<12}{source.classes:>8}{train:>9,}{test:>8,}  {size:>9}  {here}")
    return 0


def fetch_dataset(args: argparse.Namespace) -> int:
    """Download, verify and unpack a data set."""
    dataset, folder = find(args.name), data_folder(args.folder)
    archive = fetch(dataset.source, folder, args.mirror)
    checked = check_archive(dataset.source, archive) or "its files exist already"
    print(f"{dataset.name} is in {folder} ({checked})")
    return 0


def verify_dataset(args: argparse.Namespace) -> int:
    """Verify the archive, the files and the cache of a data set, as far as they exist."""
    dataset, folder = find(args.name), data_folder(args.folder)
    converted = cache_path(folder, dataset.name)
    checked = check_archive(dataset.source, folder / dataset.source.archive)
    if checked:
        print(f"archive  good: {dataset.source.archive}, {checked}")
    if files := dataset.locate(folder):
        print(f"files    good: {_check_files(dataset, files)}")
    if converted.exists():
        cache.check(converted)
        print(f"cache    good: {converted}")
    if not (checked or files or converted.exists()):
        raise dataset.source.missing(folder)
    return 0


def _check_files(dataset: Dataset, files: list[Path]) -> str:
    """Read all of a data set's files, as the first load does, and describe their content."""
    rows = {}
    for path in files:
        if not path.exists():
            raise UsageError(f"{path}: missing; unpack the archive of this data set again")
    for name, array in dataset.build(files).items():
        blocks = array.blocks if isinstance(array, cache.Stream) else [array]
        rows[name] = sum(len(block) for block in blocks)
    examples, official = (rows["train_x"], rows["test_x"]), dataset.source.examples
    text = "{:,} training and {:,} test examples".format(*examples)
    other = dataset.text and files[0].name not in dataset.source.entries  # of other size
    if examples == official or other:
        return text
    return text + " (officially {:,} and {:,})".format(*official)


def show_dataset(args: argparse.Namespace) -> int:
    """Print statistics and a text heat map of clients x classes, and draw them to a file.

    Of a text, the largest clients and a sample are printed instead of the heat map.
    """
    dataset = find(args.name)
    if args.out:
        check_writable(args.out)
    kind = args.partition or ("natural" if dataset.natural else "dirichlet")
    raw = dataset.load(args.folder)
    federation = raw.federation(partition_by(raw, kind, args))
    counts = class_counts(federation, raw.classes)
    title = f"{raw.name}, {kind} partition" + (
        f", alpha {args.alpha:g}" if kind.startswith("dirichlet") else ""
    )
    if raw.is_text:
        print(title, *describe_text(raw, federation), sep="\n")
    else:
        print(title, *describe(counts), *text_heat_map(counts), sep="\n")
    if args.out:
        draw(counts, args.out, title)
        print(f"drawn to {args.out}")
    return 0


def partition_by(raw: RawSplits, kind: str, args: argparse.Namespace) -> partition.Parts | None:
    """Return the partition that the options select; None for natural clients."""
    labels = np.asarray(raw.train["y"])
    if raw.is_text and kind not in ("natural", "iid"):
        raise UsageError(
            f"{raw.name} is text, without a label per example; use --partition natural or iid"
        )
    rng = generator(args.seed, f"{raw.name} partition")  # as in tasks with such a partition
    if kind == "iid":
        return partition.iid(len(labels), args.clients, rng)
    if kind == "shards":
        return partition.shards(labels, args.clients, args.shards, rng)
    if kind == "dirichlet":
        return partition.dirichlet(labels, args.clients, args.alpha, rng)
    if kind == "dirichlet-unequal":
        return partition.dirichlet_unequal(labels, args.clients, args.alpha, rng)
    return None


def class_counts(federation: Federation, classes: int) -> Counts:
    """Return the number of labels per client (row) and class (column); of text, of tokens."""
    labels = federation.fields["y"].numpy()
    per_example = labels[0].size
    labels = labels.reshape(-1)
    owner = np.repeat(np.arange(federation.clients), federation.sizes * per_example)
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
    values = {
        "clients": f"{len(counts):,}",
        "examples": f"{counts.sum():,}",
        "classes": str(counts.shape[1]),
        "client size": _spread(counts.sum(axis=1)),
        "classes per client": f"mean {np.count_nonzero(counts, axis=1).mean():.2f}",
    }
    return [f"{name:<20}{value}" for name, value in values.items()]


def _spread(sizes: Counts) -> str:
    text = f"min {sizes.min():,}, median {np.median(sizes):,.1f}, max {sizes.max():,}"
    return text.replace(".0,", ",")


def describe_text(raw: RawSplits, federation: Federation) -> list[str]:
    """Return statistics of a text data set, its largest clients and a sample, one per line."""
    sizes = federation.sizes
    tokens = [int((split["y"] != PAD).sum()) for split in (raw.train, raw.test)]
    values = {
        "clients": f"{federation.clients:,}",
        "sequences": f"{len(raw.train['y']):,} training, {len(raw.test['y']):,} test",
        "tokens": "{:,} training, {:,} test, without padding".format(*tokens),
        "vocabulary": f"{raw.classes} tokens",
        "client size": f"{_spread(sizes)} sequences",
    }
    lines = [f"{name:<20}{value}" for name, value in values.items()]
    order = np.argsort(-sizes, kind="stable")[:LARGEST]
    named = raw.clients if len(raw.clients) == federation.clients else range(federation.clients)
    lines += ["", "largest clients     sequences"]
    lines += [f"{sizes[i]:>29,}  {named[i]}" for i in order]
    sample = decode(federation.client(int(order[0]))["x"][:4].flatten().tolist())
    return [*lines, "", f"sample of {named[order[0]]}:", *sample.splitlines()]


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
    clients, classes = counts.shape
    figure, (axes,) = new_figure(1, 12.0, min(12.0, 2 + 0.22 * classes))
    (_draw_bubbles if clients <= BUBBLES else _draw_heat_map)(axes, counts)
    label(axes, "client", "class", title)
    save(figure, path)


def _draw_bubbles(axes: Any, counts: Counts) -> None:
    client, kind = np.nonzero(counts)
    share = counts[client, kind] / counts.max()
    axes.scatter(client, kind, s=120 * share, alpha=0.8, linewidths=0)
    axes.set(xlim=(-1, len(counts)), ylim=(counts.shape[1] - 0.4, -0.6))


def _draw_heat_map(axes: Any, counts: Counts) -> None:
    share = counts / counts.sum(axis=1, keepdims=True)
    image = axes.imshow(share.T, aspect="auto", interpolation="nearest", cmap="magma_r")
    axes.grid(False)
    axes.figure.colorbar(image, label="share of the client's examples")
