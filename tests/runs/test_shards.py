"""Shares of many runs: complete, disjoint, even; and a run that another job holds is left to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedexp.errors import UsageError
from fedexp.runs import run_all, run_id
from fedexp.runs.folder import BusyError, RunFolder
from fedexp.runs.pool import Shard, parse_shard
from fedexp.runs.spec import Spec
from tests.runs.helpers import nobody, tiny


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 7))
def test_every_item_is_in_one_share_and_shares_are_even(items: int, count: int, alike: int) -> None:
    """Also in each kind, where items of a kind stand together."""
    listed = list(range(items))
    shares = [Shard(index, count).of(listed) for index in range(1, count + 1)]
    assert sorted(item for share in shares for item in share) == listed
    for kind in {item // alike for item in listed}:
        sizes = [sum(item // alike == kind for item in share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/", "/2", "-1/2", "1/0", "a/b", "1/2/3", ""])
def test_a_share_that_does_not_exist(text: str) -> None:
    with pytest.raises(UsageError, match="--shard takes i/n with i from 1 to n"):
        parse_shard(text)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_another_process_holds_is_left_to_it(jobs: int, tmp_path: Path) -> None:
    specs = [tiny(seed=seed) for seed in range(3)]
    run = specs[1].prepare()
    left: list[Spec] = []
    with RunFolder.of(tmp_path / run_id(run), run):
        outcomes = run_all(specs, jobs, nobody, tmp_path, on_busy=left.append)
        with pytest.raises(BusyError, match="another process is working on"):
            run_all(specs[1:], jobs, nobody, tmp_path)
    assert [outcome.spec for outcome in outcomes] == [specs[0], specs[2]]
    assert left == [specs[1]]
    assert [len(each.rows) for each in run_all(specs, 1, nobody, tmp_path)] == [6, 6, 6]
