"""The command that repeats a run gives the very same run."""

from __future__ import annotations

import shlex

import pytest

from fedexp.cli.main import build_parser
from fedexp.cli.options import spec_of
from fedexp.runs import frozen, run_id
from fedexp.runs.folder import rerun
from fedexp.runs.spec import Spec

SPECS = [
    Spec("toy", "fedexp"),
    Spec("toy", "fedavg", seed=3, rounds=7, cohort=1, evaluate_every=2, engine="loop"),
    Spec("toy", "fedexp", mode="authors-code", options=(("eps", "0.5"), ("task.start", "1,-2"))),
    Spec("toy", "fedprox", device="cpu", precision="float32", stop_at=0.25, deterministic=True),
    Spec("toy", "fedexp", options=(("server.max_step", "inf"), ("local.clip_norm", "none"))),
]


@pytest.mark.parametrize("spec", SPECS)
def test_the_command_gives_the_same_run(spec: Spec) -> None:
    run = spec.prepare()
    words = shlex.split(rerun(frozen(run)))
    assert words[0] == "fedexp"
    args = build_parser().parse_args(words[1:])
    again = spec_of(args, args.algorithm, args.seed).prepare()
    assert again.describe() == run.describe()
    assert run_id(again) == run_id(run)


def test_values_are_quoted_for_a_shell() -> None:
    value = 'a b\'; $(rm x) "<script>"'
    words = shlex.split(rerun({**frozen(SPECS[0].prepare()), "set": {"task.folder": value}}))
    assert words[-1] == f"task.folder={value}"
