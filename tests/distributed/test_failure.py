"""Which rank reports a failure, given the keys that ranks have left in the store."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from fedexp.distributed import Ranks, failure
from fedexp.distributed.failure import (
    DONE,
    ENDED,
    FAILED,
    REPORTER,
    another_failed,
    failure_report,
    monitored,
)

CPU = torch.device("cpu")


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Ranks]:
    """Three ranks with one store, which do not wait for each other."""
    monkeypatch.setattr(failure, "REPLY_TIMEOUT", 0.0)
    store = HashStore()
    return [Ranks(rank, 3, rank, CPU, store, gloo_group=None) for rank in range(3)]


def test_the_first_rank_reports_an_error_of_all_ranks(three: list[Ranks]) -> None:
    lines = [failure_report(rank, "no such task") for rank in three]
    assert lines == ["no such task", None, None]


def test_an_error_of_one_rank_is_reported_with_its_number(three: list[Ranks]) -> None:
    assert failure_report(three[2], "out of memory") == "rank 2: out of memory"
    assert failure_report(three[0], None) is None
    assert three[0].store.get(REPORTER) == b"2"


def test_ranks_that_do_not_answer_are_named(three: list[Ranks]) -> None:
    line = failure_report(three[0], None)
    assert line is not None
    assert line.startswith("ranks 1, 2 died without an error message")


def test_a_rank_is_silent_if_rank_0_has_stopped_as_asked(three: list[Ranks]) -> None:
    """Rank 0 was asked to stop and has reported that; the others find it gone."""
    for rank in three[:2]:
        with monitored(rank):
            pass
    assert failure_report(three[2], None) is None


def test_a_rank_that_ends_by_an_error_is_not_done(three: list[Ranks]) -> None:
    with pytest.raises(ValueError, match="something"), monitored(three[0]):
        raise ValueError("something")
    assert not three[0].store.check([DONE.format(0)])


def test_an_interrupted_job_is_reported_once(three: list[Ranks]) -> None:
    for rank in three:
        rank.store.set(ENDED.format(rank.rank), "")
    lines = [failure_report(rank, None) for rank in three]
    assert lines == ["interrupted", None, None]
    assert three[0].store.check([FAILED])


def test_a_rank_that_does_not_answer_counts_as_failed(three: list[Ranks]) -> None:
    assert another_failed(three[0])
    assert another_failed(three[1])  # the third rank is still missing
    assert not another_failed(three[2])


class LostStore:
    """A store whose host has ended."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("connection closed")


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        ("True", ["torchrun ended", None, None, "torchrun ended"]),
        ("False", [None, "rank 0 ended", None, "rank 0 ended"]),
    ],
)
def test_a_lost_store_is_reported_once_per_machine(
    monkeypatch: pytest.MonkeyPatch, agent: str, expected: list[str | None]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    first, others = 1 if agent == "False" else 0, 3  # rank 3 is on a machine of its own
    lines: list[str | None] = [None] * first
    for rank in range(first, others + 1):
        ranks = Ranks(rank, 4, rank % others, CPU, LostStore(), gloo_group=None)
        line = failure_report(ranks, None)
        lines.append(line and line.partition(";")[0])
    assert lines == expected
