"""What several commands share: settings from options, where runs are stored, ranks and shards."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from fedexp.distributed import RankLostError, check_device, ranks
from fedexp.distributed.failure import another_failed
from fedexp.errors import require
from fedexp.experiment import Experiment
from fedexp.plain import privacy_from
from fedexp.privacy.settings import Privacy
from fedexp.runs.pool import Shard, parse_shard
from fedexp.runs.spec import read_experiment
from fedexp.text import parse_assignments
from fedexp_command.parsers import FLAGS


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of `Experiment` that the options give."""
    settings = {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    if args.set:
        settings["options"] = parse_assignments(args.set)
    if args.privacy is not None:
        settings["privacy"] = parse_privacy(args.privacy)
    return settings


def experiment_of(args: argparse.Namespace) -> Experiment:
    """Return the experiment that the options of `fedexp run` describe.

    Of a `spec.toml`, options change those that it has.
    """
    settings = settings_of(args)
    for name in ("algorithm", "seed"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    if not args.task.endswith(".toml"):
        return Experiment(args.task, **settings)
    stored = read_experiment(Path(args.task))
    options = settings.pop("options", {})
    return stored.replace(**settings).with_options(options)


def parse_privacy(text: str) -> Privacy:
    """Return the privacy settings of a text such as `central:clip=1,delta=1e-5,epsilon=8`.

    >>> parse_privacy("local:clip=1,delta=1e-5,noise_multiplier=2").clip
    1.0
    """
    kind, _, listed = text.partition(":")
    pairs = (pair.partition("=") for pair in listed.split(",") if pair)
    return privacy_from({**{name.strip(): value.strip() for name, _, value in pairs}, "kind": kind})


def root_of(args: argparse.Namespace) -> Path | None:
    """Return the folder of all runs; None where nothing is to be stored."""
    if args.no_save:
        require(args.runs is None, "--runs and --no-save exclude each other; choose one")
        return None
    return args.runs or Path(os.environ.get("FEDEXP_RUNS") or "runs")


def check_format(args: argparse.Namespace) -> None:
    """Refuse --json together with --format: one of them would be ignored."""
    both = args.json and args.format != "text"
    require(not both, f"--json and --format {args.format} exclude each other; leave one out")


def check_many(args: argparse.Namespace) -> None:
    """Refuse options that exclude each other, before data are read."""
    shard_of(args)
    require(
        not (args.restart and args.no_save),
        "--restart needs stored runs; leave --no-save out",
    )
    check_jobs(args.jobs, args.device)


def check_jobs(jobs: int | None, device: str | None) -> None:
    """Refuse `--jobs` with ranks, each of which executes one run at a time."""
    if (group := ranks()) is not None:
        require(
            jobs is None,
            f"torchrun started {group.world_size} processes, each for one run; leave --jobs out",
        )
        check_device(device)


def shard_of(args: argparse.Namespace) -> Shard | None:
    """Return the shard that `--shard` selects; None for all runs."""
    if args.shard is None:
        return None
    require(
        not args.no_save,
        "--shard needs stored runs, which the other shards read; leave --no-save out, or --shard",
    )
    return parse_shard(args.shard)


def is_silent() -> bool:
    """Return whether this is a rank other than the first: those print and write nothing."""
    group = ranks()
    return group is not None and not group.is_first


def refuse_if_lost() -> None:
    """Raise `RankLostError` if ranks stopped because one of them failed; it reports the cause."""
    group = ranks()
    if group is not None and another_failed(group):
        raise RankLostError("another rank has failed")


def listed(names: str) -> list[str]:
    """Return the names in a text such as `fedexp,fedavg`, each once."""
    return list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def note(line: str) -> None:
    """Print a line for the user on stderr."""
    print(f"fedexp: {line}", file=sys.stderr)
