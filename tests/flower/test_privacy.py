"""Local privacy: what leaves a client, and the budget that it counts itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedexp.errors import UsageError
from fedexp.flower import FedAvg, FedExP, local_privacy
from fedexp.flower.layout import ndarrays
from fedexp.flower.privacy import FILE, FOLDER, spend
from fedexp.flower.request import REPLY_INFO
from fedexp.privacy import LocalPrivacy, Release, epsilon
from tests.flower.helpers.fake_grid import FakeGrid, only, replies
from tests.flower.helpers.plain_app import first_model as model_with_buffers
from tests.flower.helpers.plain_app import plain_app
from tests.flower.helpers.private import (
    DIM,
    NODES,
    app,
    metrics_of,
    model,
    strategy,
    update,
)

pytestmark = pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
LOCAL = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0, rounds=2)
SECRET = "patient 4711"


def local(**options: Any) -> LocalPrivacy:
    return LocalPrivacy(
        **{"clip": 1.0, "delta": 1e-5, "noise_multiplier": 0.2, "noise_seed": 0, **options}
    )


def caught(grid: FakeGrid) -> list[Message]:
    """What reaches the server from now on."""
    seen: list[Message] = []

    def tap(message: Message) -> None:
        if message.metadata.reply_to_message_id and message.metadata.message_type == "train":
            seen.append(message)

    grid.taps.append(tap)
    return seen


def test_only_a_clipped_and_noised_update_leaves_the_client() -> None:
    grid = FakeGrid(app([local_privacy(local())], scale=5.0), NODES)
    arrived = caught(grid)
    strategy(privacy=local()).start(grid, model(), 1)
    assert len(arrived) == NODES
    noise = []
    for message in arrived:
        (metrics,) = message.content.metric_records.values()
        assert dict(metrics) == {"num-examples": 1}
        (arrays,) = (ndarrays(record) for record in message.content.array_records.values())
        assert arrays["n"] == 3
        noise.append(-arrays["w"] - update(grid.position(message.metadata.src_node_id)))
    drawn = np.stack(noise)
    assert drawn.std() == pytest.approx(0.2, rel=4 / math.sqrt(2 * drawn.size))
    assert np.abs(np.corrcoef(drawn) - np.eye(NODES)).max() < 5 / math.sqrt(DIM)


def test_the_server_takes_the_noise_off_the_step_size() -> None:
    plain = metrics_of(strategy(), FakeGrid(app(), NODES))[0]
    grid = FakeGrid(app([local_privacy(local())]), NODES)
    naive = metrics_of(strategy(), grid)[0]
    corrected = metrics_of(strategy(privacy=local()), grid)[0]
    assert naive["mean_sq_norm"] > 10 * plain["mean_sq_norm"]
    assert corrected["mean_sq_norm"] <= plain["mean_sq_norm"] * 1.001
    assert corrected["server_lr"] < plain["server_lr"] < naive["server_lr"]
    assert corrected["epsilon"] == pytest.approx(epsilon(0.1, 1, 1e-5))


def test_clients_refuse_a_server_with_other_noise() -> None:
    grid = FakeGrid(app([local_privacy(local())]), 3)
    row = metrics_of(strategy(privacy=local(noise_multiplier=0.1)), grid)[0]
    assert (row["clients"], row["dropped"]) == (0, 3)


def test_updates_that_no_mod_has_noised_are_not_used(lines: list[str]) -> None:
    """They were summed, and an epsilon was reported for them."""
    row = metrics_of(strategy(privacy=local()), FakeGrid(app(), 3))[0]
    assert (row["clients"], row["dropped"]) == (0, 3)
    assert sum("add mods=[local_privacy(...)]" in line for line in lines) == 3


@pytest.mark.parametrize("noise", [0.1, "0.2", None])
def test_a_reply_with_the_mark_of_other_noise_is_not_used(noise: Any, lines: list[str]) -> None:
    def mark(content: RecordDict) -> None:
        entries = {"fedexp.clip": 1.0} | ({} if noise is None else {"fedexp.noise": noise})
        content[REPLY_INFO] = ConfigRecord(entries)

    grid = FakeGrid(app([local_privacy(local())]), 3, faults={0: only(replies(mark))})
    row = metrics_of(strategy(privacy=local()), grid)[0]
    assert (row["clients"], row["dropped"]) == (2, 1)
    assert any(f"its fedexp.noise is {noise} instead of 0.2" in line for line in lines)


def test_clients_stop_when_their_budget_is_spent() -> None:
    grid = FakeGrid(app([local_privacy(local(rounds=2))]), 3)
    rows = metrics_of(strategy(privacy=local()), grid, 3)
    assert [row["clients"] for row in rows] == [3, 3, 0]


def test_an_update_that_is_not_finite_counts_as_zero() -> None:
    grid = FakeGrid(app([local_privacy(local())], scale=math.nan), 3)
    arrived = caught(grid)
    row = metrics_of(strategy(privacy=local()), grid)[0]
    assert row["clients"] == 3
    assert all(np.isfinite(ndarrays(m.content.array_records["arrays"])["w"]).all() for m in arrived)


def test_a_client_answers_no_evaluation() -> None:
    """What it measures would be exact, whatever the server promised."""
    private = app([local_privacy(local())])

    @private.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"loss": 0.123, "num-examples": 7})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    grid = FakeGrid(private, 3)
    content = RecordDict({"arrays": model(), "config": ConfigRecord()})
    messages = [Message(content, node, "evaluate") for node in grid.get_node_ids()]
    answers = list(grid.send_and_receive(messages))
    assert all("fraction_evaluate=0.0" in str(reply.error.reason) for reply in answers)


def test_a_model_with_batchnorm_is_refused_at_the_client() -> None:
    plain = plain_app()
    private = ClientApp(mods=[local_privacy(local())])
    private.train()(lambda message, context: plain(message, context))
    grid = FakeGrid(private, 3)
    arrived = caught(grid)
    FedExP(fraction_evaluate=0.0).start(grid, model_with_buffers(), 1)
    assert all("running_mean would leave" in str(message.error.reason) for message in arrived)
    assert len(arrived) == 3


def grid_of(
    privacy: LocalPrivacy = LOCAL,
    text: str | None = None,
    nodes: int | Sequence[Mapping[str, Any]] = 3,
    seed: int = 0,
    account: str = "default",
) -> FakeGrid:
    """Nodes that have just been started; their apps raise where `text` is given."""
    app = ClientApp(mods=[local_privacy(privacy, account=account)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if text is not None:
            raise ValueError(text)
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": small_model(), "metrics": metrics}), reply_to=message)

    return FakeGrid(app, nodes, seed=seed)


def small_model() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(4, np.float32))})


def answers(grid: FakeGrid, study: str) -> list[Message]:
    """What the nodes reply to a round of a study."""
    config = ConfigRecord({"server-round": 1, "fedexp.api": study})
    content = RecordDict({"arrays": small_model(), "config": config})
    return list(
        grid.send_and_receive(
            Message(content=content, message_type="train", dst_node_id=node)
            for node in grid.get_node_ids()
        )
    )


def accepted(grid: FakeGrid, study: str) -> int:
    return sum(reply.has_content() for reply in answers(grid, study))


def test_neither_restarts_nor_names_that_a_server_sends_renew_the_budget() -> None:
    """Ten studies of a server that is not trusted get two releases from each client, not ten."""
    assert [accepted(grid_of(), f"study {k}") for k in range(10)] == [3, 3] + [0] * 8
    (refusal, *_) = answers(grid_of(), "another")
    assert "2 rounds, all that its privacy budget allows" in str(refusal.error.reason)


def test_the_ids_that_a_superlink_draws_do_not_renew_it_either() -> None:
    """A node without a name of its own is the only client of its folder."""
    nameless = [accepted(grid_of(nodes=[{}], seed=k), "one") for k in range(4)]
    assert nameless == [1, 1, 0, 0]
    assert accepted(grid_of(nodes=[{"fedexp-client": "ward 3"}]), "one") == 1


def test_apps_share_a_budget_unless_they_name_accounts() -> None:
    assert [accepted(grid_of(account=name), "one") for name in "aaab"] == [3, 3, 0, 3]


def test_releases_with_other_noise_count_by_what_they_cost() -> None:
    """One with half the noise costs as much as four: two rounds of a budget of six are left."""
    loud = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0, rounds=1)
    budget = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0, rounds=6)
    assert accepted(grid_of(loud), "one") == 3
    assert [accepted(grid_of(budget), "one") for _ in range(3)] == [3, 3, 0]
    assert accepted(grid_of(loud), "one") == 0


@pytest.mark.parametrize(
    "damage",
    [None, b"", b"[]", b'{"releases": [{"count": 1}]}', b'{"rounds": 1}'],
    ids=["missing", "empty", "list", "partial", "other"],
)
def test_a_count_that_is_lost_or_damaged_lets_nothing_out(
    state_folder: Path, damage: bytes | None
) -> None:
    assert accepted(grid_of(), "one") == 3
    counts = sorted(state_folder.rglob(FILE))
    assert [path.stat().st_mode & 0o777 for path in counts] == [0o600] * 3
    if damage is None:
        counts[0].unlink()
    else:
        counts[0].write_bytes(damage)
    assert accepted(grid_of(), "one") == 2
    reasons = [str(reply.error.reason) for reply in answers(grid_of(), "one") if reply.has_error()]
    assert sum(f"restore {FILE}" in reason for reason in reasons) == 1


def test_processes_of_a_client_count_one_by_one(tmp_path: Path) -> None:
    """Sixteen at once, and room for seven."""
    account = tmp_path / FOLDER / "client" / "default"

    def is_spent(_: int) -> bool:
        try:
            spend(account, Release(1.0), 7)
        except UsageError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(is_spent, range(16))) == 7


def test_without_a_budget_nothing_is_written(state_folder: Path) -> None:
    endless = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0)
    assert accepted(grid_of(endless), "one") == 3
    assert not state_folder.exists()


def test_text_of_an_error_stays_on_the_client() -> None:
    reasons = [str(reply.error.reason) for reply in answers(grid_of(text=SECRET), "one")]
    assert all("training raised ValueError" in reason for reason in reasons)
    assert not any(SECRET in reason for reason in reasons)
    assert accepted(grid_of(), "one") == 3
    assert accepted(grid_of(), "one") == 0  # the round that failed was charged


def test_a_round_that_clients_answered_and_the_server_lost_is_charged(tmp_path: Path) -> None:
    """Clients' noised updates are out when they send them, whatever becomes of the server."""
    endless = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0)

    def start(grid: FakeGrid) -> Any:
        strategy = FedAvg(fraction_evaluate=0.0, privacy=endless, checkpoint=tmp_path / "run")
        return strategy.start(grid, small_model(), 3).train_metrics_clientapp

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
