"""Who says what at the end of a job, by what the ranks have left in their store."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from fedexp.distributed import Ranks, failure
from fedexp.distributed.failure import ALARM, ENDED, LEFT, SPOKEN, last_words, watched

CPU = torch.device("cpu")


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Ranks]:
    """Three ranks with one store, who do not wait for each other."""
    monkeypatch.setattr(failure, "PATIENCE", 0.0)
    store = HashStore()
    return [Ranks(rank, 3, rank, CPU, store, talk=None) for rank in range(3)]


def test_the_first_rank_tells_of_a_mistake_that_all_make(three: list[Ranks]) -> None:
    said = [last_words(rank, "no such task") for rank in three]
    assert said == ["no such task", None, None]


def test_what_befalls_one_rank_is_told_with_its_number(three: list[Ranks]) -> None:
    assert last_words(three[2], "out of memory") == "rank 2: out of memory"
    assert last_words(three[0], None) is None
    assert three[0].store.get(SPOKEN) == b"2"


def test_ranks_that_gave_no_sign_are_named(three: list[Ranks]) -> None:
    line = last_words(three[0], None)
    assert line is not None
    assert line.startswith("ranks 1, 2 ended without a word")


def test_a_rank_that_was_left_by_others_in_good_order_is_silent(three: list[Ranks]) -> None:
    """The first was asked to stop and has said so; the others find it gone."""
    for rank in three[:2]:
        with watched(rank):
            pass
    assert last_words(three[2], None) is None


def test_who_ends_by_an_error_has_not_left(three: list[Ranks]) -> None:
    with pytest.raises(ValueError, match="something"), watched(three[0]):
        raise ValueError("something")
    assert not three[0].store.check([LEFT.format(0)])


def test_interrupted_ranks_say_so_once(three: list[Ranks]) -> None:
    for rank in three:
        rank.store.set(ENDED.format(rank.rank), "")
    said = [last_words(rank, None) for rank in three]
    assert said == ["interrupted", None, None]
    assert three[0].store.check([ALARM])
