"""`fedexp run`: one algorithm on one task."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from fedexp.cli.options import add_out, add_run_options, seed, spec_of
from fedexp.cli.progress import describe, progress_bar
from fedexp.engine import Record
from fedexp.errors import FedExPError, UsageError, require
from fedexp.experiments.spec import Run


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("run", help="train with one algorithm")
    add_run_options(parser)
    parser.add_argument("--algorithm", default="fedexp", metavar="A", help="default: fedexp")
    parser.add_argument("--seed", type=seed, default=0, metavar="S")
    add_out(parser, "folder for the spec, the records and the model")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prepared = spec_of(args, args.algorithm, args.seed).prepare()
    if prepared.is_small:
        torch.set_num_threads(1)
    records = prepared.records()
    began = time.perf_counter()
    last: Record | None = None
    with ExitStack() as stack:
        log = stack.enter_context(_open_log(args.out, prepared)) if args.out else None
        title = f"{prepared.spec.task} {prepared.spec.algorithm}"
        bar = stack.enter_context(progress_bar(title, prepared.rounds))
        for last in _cleaning_up(records, args.out):
            row = last.to_json()
            bar(row)
            if log:
                log.write(json.dumps(row) + "\n")
                log.flush()
    assert last is not None
    if last.state.steps == 0:
        raise FedExPError("no client update was finite in any round; lower local.lr or clip")
    seconds = time.perf_counter() - began
    if args.out:
        _save_model(args.out, last)
    _report(args, prepared, last, seconds)
    return 0


def _cleaning_up(records: Iterator[Record], out: Path | None) -> Iterator[Record]:
    """The records; a mistake that shows only in the first round leaves no folder behind."""
    began = False
    try:
        for record in records:
            began = True
            yield record
    except UsageError:
        if out is not None and not began:
            for name in ("records.jsonl", "spec.json"):
                (out / name).unlink()
        raise


def _report(args: argparse.Namespace, run: Run, last: Record, seconds: float) -> None:
    final = last.to_json()
    if args.json:
        head = {"task": run.spec.task, "algorithm": run.spec.algorithm, "seed": run.spec.seed}
        print(json.dumps({**head, "rounds": last.round, "seconds": seconds, "final": final}))
        return
    name = f"{run.spec.algorithm} on {run.spec.task}"
    print(f"{name}: {last.round} rounds in {seconds:.1f} s  {describe(final)}")
    if last.dropped:
        print(f"{last.dropped} client update(s) of the last round were dropped", file=sys.stderr)
    if args.out:
        print(f"wrote spec.json, records.jsonl and model.npz to {args.out}", file=sys.stderr)


def _open_log(folder: Path, run: Run) -> IO[str]:
    """The folder of a run, with its spec; records are added line by line as they come."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = folder / "records.jsonl"
        require(not taken.exists(), f"{folder} already holds a run; choose another --out")
        (folder / "spec.json").write_text(
            json.dumps(run.describe(), indent=2, allow_nan=False) + "\n"
        )
        return taken.open("w")
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}; choose another --out"
        ) from None


def _save_model(folder: Path, last: Record) -> None:
    """The output model as plain arrays: the flat parameters and buffers."""
    params, buffers = last.state.output()
    np.savez(
        folder / "model.npz",
        params=params.cpu().numpy(),
        buffers=buffers.averaged.cpu().numpy(),
        kept_buffers=buffers.kept.cpu().numpy(),
    )
