"""Errors whose remedy depends on the front end."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest

from fedexp import api
from fedexp.cli import main as command
from fedexp.errors import DamagedError, OtherContentError, ReasonError, remedies
from fedexp.flower import checkpoint


def kinds() -> set[str]:
    return {kind.kind for kind in ReasonError.__subclasses__()}


@pytest.mark.parametrize("by_kind", [api.REMEDIES, command.REMEDIES])
def test_a_front_end_has_a_remedy_for_every_kind(by_kind: Mapping[str, str]) -> None:
    assert by_kind.keys() == kinds() >= checkpoint.REMEDIES.keys()


def test_the_outermost_front_end_adds_its_remedy() -> None:
    error = OtherContentError("the data differ")
    with pytest.raises(OtherContentError) as raised, remedies({"content": "use --restart"}):  # noqa: SIM117
        with remedies({"content": "use restart=True"}):
            raise error
    assert str(raised.value) == "the data differ; use --restart"
    assert raised.value is error
    with pytest.raises(OtherContentError, match="restart=True"), remedies(api.REMEDIES):
        raise error


def test_an_error_without_a_front_end_is_its_reason() -> None:
    assert str(DamagedError("it is damaged")) == "it is damaged"


def test_an_error_passes_between_processes() -> None:
    error = DamagedError("it is damaged", "remove it")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason) == ("it is damaged; remove it", "it is damaged")
