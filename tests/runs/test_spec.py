"""Specs are checked without data, survive TOML, and decide the id of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedexp as fx
from fedexp.catalogue import TASKS, build_task
from fedexp.runs import frozen, read_spec, run_id, spec_from
from fedexp.runs.spec import Spec, check_same, spec_text
from fedexp.tasks import Task
from fedexp_command.rerun import rerun
from tests.runs.helpers import tiny

TASK = build_task("synthetic", {"clients": "4", "rows": "3", "dim": "20"})

POSITIVE = st.floats(1e-300, 1e300).map(repr)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "eps": POSITIVE,
        "local.lr": POSITIVE,
        "local.clip_norm": POSITIVE | st.just("none"),
        "server.max_step": st.floats(1, allow_nan=False).map(repr),
        "local.epochs": st.integers(1, 10**9).map(str) | st.just("none"),
    },
).map(lambda options: tuple(options.items()))
SPECS = st.builds(
    Spec,
    task=st.just("synthetic"),
    algorithm=st.sampled_from(["fedexp", "fedexp-m", "scaffold-exp"]),
    seed=st.integers(0, 2**70),
    rounds=st.none() | st.integers(1, 10**6),
    cohort=st.none() | st.integers(0, 4),
    mode=st.sampled_from(["paper", "authors-code", "recommended"]),
    evaluate_every=st.none() | st.integers(1, 50),
    engine=st.sampled_from(["auto", "loop", "batched"]),
    device=st.sampled_from([None, "cpu", "cuda:0"]),
    precision=st.sampled_from([None, "float32", "bf16"]),
    stop_at=st.none() | st.floats(1e-300, 1e300),
    deterministic=st.booleans(),
    options=OPTIONS,
)


def written(spec: Spec, folder: Path) -> dict[str, Any]:
    (folder / "spec.toml").write_text(spec_text(frozen(spec.prepare(TASK))))
    return read_spec(folder)


@given(spec=SPECS)
def test_a_spec_comes_back_from_its_file(spec: Spec) -> None:
    with TemporaryDirectory() as folder:
        stored = written(spec, Path(folder))
    again = spec_from(stored).prepare(TASK)
    run = spec.prepare(TASK)
    assert frozen(again) == frozen(run)
    assert run_id(again) == run_id(run) == stored["id"]
    assert again.describe() == run.describe()


def test_a_spec_of_epochs_has_no_number_of_steps(tmp_path: Path) -> None:
    small = {"task.clients": "4", "task.rows": "3", "task.dim": "20"}
    run = Spec("synthetic", "fedavg", options=(*small.items(), ("epochs", "2"))).prepare()
    spec = frozen(run)
    assert (spec["options"]["local.steps"], spec["options"]["local.epochs"]) == ("none", 2)
    assert [name for name in spec["changed"] if "local" in name] == ["local.epochs"]
    again = spec_from(spec).prepare()
    assert again.setup == run.setup
    check_same(spec, frozen(again), tmp_path)
    assert "steps" not in rerun(spec)


CHANGES: list[dict[str, Any]] = [
    {"algorithm": "fedexp"},
    {"seed": 1},
    {"rounds": 7},
    {"cohort": 2},
    {"mode": "authors-code"},
    {"evaluate_every": 2},
    {"engine": "loop"},
    {"device": "cpu"},
    {"precision": "float32"},
    {"stop_at": 0.5},
    {"deterministic": True},
    {"options": (("eps", "0.5"),)},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_choice_is_part_of_the_id(change: dict[str, Any]) -> None:
    assert run_id(replace(tiny(), **change).prepare(TASK)) != run_id(tiny().prepare(TASK))


def test_what_means_the_same_has_the_same_id() -> None:
    digits = Spec("digits", "fedavg", stop_at=90)
    run = digits.prepare()
    assert run_id(replace(digits, stop_at=0.9).prepare(run.task)) == run_id(run)
    assert run_id(replace(digits, rounds=run.task.rounds).prepare(run.task)) == run_id(run)
    assert run_id(run).startswith("digits-fedavg-s0-")


def test_a_changed_spec_is_refused(tmp_path: Path) -> None:
    written(tiny(), tmp_path)
    path = tmp_path / "spec.toml"
    whole = path.read_text()
    for text, message in [
        (whole.replace("rounds = 6", "rounds = 7"), "has been changed since the run began"),
        (whole.replace("format = 2", "format = 3"), "has format 3, this fedexp reads 2"),
        (whole[: len(whole) // 2].rpartition("=")[0] + "= ", "is damaged"),
        ("format = 2\n", "has been changed"),
        ("\x00", "is damaged"),
    ]:
        path.write_text(text)
        with pytest.raises(fx.UsageError, match=message):
            read_spec(tmp_path)
    path.unlink()
    with pytest.raises(fx.UsageError, match="is not a run"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Spec("cifar11", "fedexp"), "unknown task 'cifar11'; did you mean cifar10"),
        (Spec("cifar10", "fedxp"), "unknown algorithm 'fedxp'"),
        (Spec("cifar10", "fedexp", mode="papr"), "unknown mode 'papr'"),
        (Spec("cifar10", "fedexp", options=(("task.clints", "3"),)), "unknown option of task"),
        (Spec("cifar10", "fedexp", options=(("task.clients", "x"),)), "must be a whole number"),
        (Spec("cifar10", "fedexp", options=(("epsilon", "1"),)), "unknown option of fedexp"),
        (Spec("cifar10", "fedexp", options=(("eps", "abc"),)), "server.eps must be a number"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_mistake_is_found_without_data_or_model(
    spec: Spec, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @wraps(TASKS["cifar10"])
    def refuse(*arguments: Any, **more: Any) -> Task:
        raise AssertionError("no data should be read")

    monkeypatch.setitem(TASKS, "cifar10", refuse)
    for check in (spec.check, spec.prepare):
        with pytest.raises(fx.UsageError, match=message):
            check()
