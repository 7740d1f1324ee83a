"""Command-line options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedexp.errors import UsageError
from fedexp.experiments.setup import parse_assignments
from fedexp.experiments.spec import Spec


class Parser(argparse.ArgumentParser):
    """Mistakes get one line and exit status 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message} (see {self.prog} --help)")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options that decide what a run computes."""
    parser.add_argument("task", metavar="TASK", help="a task; `fedexp tasks` lists them")
    parser.add_argument("--rounds", type=positive, metavar="N", help="rounds (the task's own)")
    parser.add_argument(
        "--cohort", type=_cohort, metavar="K", help="clients a round, or all (the task's own)"
    )
    parser.add_argument(
        "--mode",
        default="paper",
        metavar="MODE",
        help="paper (default), or authors-code for every deviation of the released code",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option, e.g. eps=0.01, local.lr=0.1, task.clients=20; in a comparison also "
        "fedexp:eps=0.01; may be repeated",
    )
    parser.add_argument(
        "--evaluate-every", type=positive, metavar="N", help="rounds between evaluations"
    )
    parser.add_argument(
        "--engine",
        default="auto",
        choices=["auto", "loop", "vectorized"],
        help="clients one by one, all at once, or what is faster (default)",
    )
    parser.add_argument("--device", metavar="D", help="cpu (default) or cuda")
    parser.add_argument(
        "--precision", choices=["float32", "tf32", "bf16"], help="arithmetic inside the model"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def add_out(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--out", type=Path, metavar="PATH", help=meaning)


def spec_of(args: argparse.Namespace, algorithm: str, seed: int) -> Spec:
    """The spec that the options of `add_run_options` describe."""
    return Spec(
        task=args.task,
        algorithm=algorithm,
        seed=seed,
        rounds=args.rounds,
        cohort=args.cohort,
        mode=args.mode,
        evaluate_every=args.evaluate_every,
        engine=args.engine,
        device=args.device,
        precision=args.precision,
        options=tuple(parse_assignments(args.set).items()),
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _at_least(1, text)


def _cohort(text: str) -> int:
    return 0 if text == "all" else positive(text)


def seed(text: str) -> int:
    """A seed is a whole number that is not negative."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.lstrip("-").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least}, not {text!r}")
    return int(text)
