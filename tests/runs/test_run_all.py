"""The runs of a comparison: in one process or several, and the tasks they are built from."""

from __future__ import annotations

import numpy as np
import pytest

import fedexp as fx
from fedexp.options import build_task
from fedexp.runs.pool import run_all
from fedexp.runs.spec import Outcome, Spec

SMALL = (("task.clients", "4"), ("task.rows", "3"), ("task.dim", "20"))


def untimed(outcome: Outcome) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in outcome.rows]


def test_processes_give_the_same_rows_in_the_same_order() -> None:
    specs = [
        Spec("synthetic", a, s, 3, options=SMALL) for a in ("fedexp", "scaffold") for s in (0, 1)
    ]
    seen: list[tuple[Spec, int]] = []
    one = run_all(specs, 1, lambda spec, row: None)
    two = run_all(specs, 2, lambda spec, row: seen.append((spec, row["round"])))
    assert [o.spec for o in two] == specs
    assert [untimed(o) for o in one] == [untimed(o) for o in two]
    assert sorted(seen, key=str) == sorted(
        [(spec, r) for spec in specs for r in (1, 2, 3)], key=str
    )


@pytest.mark.parametrize("algorithms", [("fedexp", "nothing"), ("nothing", "fedexp")], ids=str)
def test_a_failing_run_stops_the_rest_at_once(algorithms: tuple[str, ...]) -> None:
    specs = [Spec("synthetic", name, rounds=5000) for name in algorithms]
    seen: list[int] = []
    with pytest.raises(fx.UsageError, match="unknown algorithm"):
        run_all(specs, 2, lambda spec, row: seen.append(row["round"]))
    assert 5000 not in seen


def test_seeds_change_the_data() -> None:
    zero, one = (build_task("synthetic", {"dim": "20"}, seed) for seed in (0, 1))
    assert not np.array_equal(zero.train.fields["x"], one.train.fields["x"])
    fixed = build_task("synthetic", {"dim": "20", "seed": "0"}, 1)
    assert np.array_equal(zero.train.fields["x"], fixed.train.fields["x"])


def test_unknown_task_options_are_refused() -> None:
    with pytest.raises(fx.UsageError, match=r"did you mean task\.clients"):
        build_task("synthetic", {"client": "3"})
