"""What a client's promise of so many noised rounds outlives, and what the server charges for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedexp.flower import FedAvg, local_privacy
from fedexp.flower.budget import FILE
from fedexp.privacy import LocalPrivacy, epsilon
from tests.flower.fake_grid import FakeGrid

LOCAL = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0, rounds=2)
SECRET = "patient 4711"


def grid_of(privacy: LocalPrivacy = LOCAL, says: str | None = None) -> FakeGrid:
    """Three nodes that have just been started; their apps raise where `says` is given."""
    app = ClientApp(mods=[local_privacy(privacy)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if says is not None:
            raise ValueError(says)
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": model(), "metrics": metrics}), reply_to=message)

    return FakeGrid(app, 3)


def model() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(4, np.float32))})


def answers(grid: FakeGrid, study: str) -> list[Message]:
    """What the nodes reply to a round of a study."""
    config = ConfigRecord({"server-round": 1, "fedexp.study": study})
    content = RecordDict({"arrays": model(), "config": config})
    return list(
        grid.send_and_receive(
            Message(content=content, message_type="train", dst_node_id=node)
            for node in grid.get_node_ids()
        )
    )


def accepted(grid: FakeGrid, study: str) -> int:
    return sum(reply.has_content() for reply in answers(grid, study))


def test_restarting_the_nodes_does_not_renew_the_budget() -> None:
    assert [accepted(grid_of(), "one") for _ in range(3)] == [3, 3, 0]
    assert accepted(grid_of(), "another") == 3
    (refusal, *_) = answers(grid_of(), "one")
    assert "2 rounds, all that its privacy budget allows" in str(refusal.error.reason)


def test_a_count_that_cannot_be_read_lets_nothing_out(state_folder: Path) -> None:
    assert accepted(grid_of(), "one") == 3
    counts = sorted(state_folder.glob(f"one/*/{FILE}"))
    assert [path.stat().st_mode & 0o777 for path in counts] == [0o600] * 3
    counts[0].write_bytes(b"")
    counts[1].write_bytes(b"[]")
    assert accepted(grid_of(), "one") == 1


def test_without_a_budget_nothing_is_written(state_folder: Path) -> None:
    endless = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0)
    assert accepted(grid_of(endless), "one") == 3
    assert not state_folder.exists()


def test_what_an_error_says_stays_with_the_client() -> None:
    reasons = [str(reply.error.reason) for reply in answers(grid_of(says=SECRET), "one")]
    assert all("training raised ValueError" in reason for reason in reasons)
    assert not any(SECRET in reason for reason in reasons)
    assert accepted(grid_of(), "one") == 3
    assert accepted(grid_of(), "one") == 0  # the round that failed was charged


def test_a_round_that_clients_answered_and_the_server_lost_is_charged(tmp_path: Path) -> None:
    """Clients' noised updates are out when they send them, whatever becomes of the server."""
    endless = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0)

    def start(grid: FakeGrid) -> Any:
        strategy = FedAvg(fraction_evaluate=0.0, privacy=endless, checkpoint=tmp_path / "run")
        return strategy.start(grid, model(), 3).train_metrics_clientapp

    def die_in_round_2(message: Message) -> None:
        if message.metadata.message_type == "train" and message.metadata.reply_to_message_id:
            replied.append(message)
        if len(replied) == 4:
            raise KeyboardInterrupt

    replied, dying = list[Message](), grid_of(endless)
    dying.taps.append(die_in_round_2)
    with pytest.raises(KeyboardInterrupt):
        start(dying)
    spent = start(grid_of(endless))
    assert spent[1]["epsilon"] == pytest.approx(epsilon(1.0, 1, 1e-5))
    assert spent[3]["epsilon"] == pytest.approx(epsilon(1.0, 4, 1e-5))
