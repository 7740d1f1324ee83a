"""A server that dies while its clients answer."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ConfigRecord, Message

from tests.flower.helpers.fake_grid import Answer


class Killed(Exception):
    """As if the process had died here."""


def dies_on(kind: str, round: int) -> Callable[[Message, Answer], Message | None]:
    def fault(message: Message, answer: Answer) -> Message | None:
        config = next(iter(message.content.config_records.values()), ConfigRecord())
        if message.metadata.message_type == kind and config.get("server-round") == round:
            answer()
            raise Killed
        return answer()

    return fault
