"""Central privacy through a strategy: clip, noise, charges, and the cohorts they assume."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedexp.errors import DivergedError, UsageError
from fedexp.flower import FedAvg, FedExP, ScaffoldExP, local_privacy, report_client_id
from fedexp.flower.layout import ndarrays
from fedexp.flower.server import NoRepliesError
from fedexp.privacy import CentralPrivacy, LocalPrivacy, Release, composed_epsilon, epsilon
from tests.flower.helpers.fake_grid import FakeGrid, only, replies, silent
from tests.flower.helpers.plain_app import first_model as model_with_buffers
from tests.flower.helpers.plain_app import plain_app
from tests.flower.helpers.private import (
    NODES,
    app,
    metrics_of,
    model,
    strategy,
    update,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")


def central(z: float, **options: Any) -> CentralPrivacy:
    return CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=z, noise_seed=0, **options)


def test_with_hardly_any_noise_it_is_the_plain_strategy() -> None:
    plain = metrics_of(strategy(weighting="uniform"), FakeGrid(app(), NODES), 2)
    private = metrics_of(strategy(privacy=central(1e-6)), FakeGrid(app(), NODES), 2)
    for one, other in zip(plain, private, strict=True):
        assert one["server_lr"] > 2
        assert other["server_lr"] == pytest.approx(one["server_lr"], rel=1e-3)


def test_metrics_have_the_cost_and_nothing_exact_of_a_client() -> None:
    rows = metrics_of(strategy(privacy=central(2.0)), FakeGrid(app(), NODES), 3)
    assert [row["epsilon"] for row in rows] == [epsilon(2.0, k, 1e-5) for k in (1, 2, 3)]
    assert all(row["delta"] == 1e-5 and 0 < row["noise_share"] <= 1 for row in rows)
    assert all("train_loss" not in row for row in rows)
    plain = metrics_of(strategy(), FakeGrid(app(), NODES))
    assert "train_loss" in plain[0]


def test_noise_that_drowns_the_updates_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    text = "take more clients per round, a smaller clip or a larger epsilon"
    metrics_of(strategy(FedAvg, privacy=central(1e-6)), FakeGrid(app(), NODES), 2)
    assert text not in caplog.text
    rows = metrics_of(strategy(FedAvg, privacy=central(1e4)), FakeGrid(app(), NODES), 8)
    assert sum(row["noise_share"] == 1.0 for row in rows) > 1
    assert caplog.text.count(text) == 1


def test_a_client_with_a_huge_update_counts_like_any_other() -> None:
    def shout(content: RecordDict) -> None:
        loud = -1e6 * update(0)
        content["arrays"] = ArrayRecord({"w": Array(loud), "n": Array(np.array(3))})

    grid = FakeGrid(app(), NODES, faults={0: replies(shout)})
    low_noise = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1e-6, noise_seed=0)
    moved = ndarrays(strategy(FedAvg, privacy=low_noise).start(grid, model(), 1).arrays)["w"]
    honest = -np.mean([update(k) for k in range(NODES)], axis=0)
    np.testing.assert_allclose(moved, honest, atol=1e-6)


def test_missing_replies_do_not_shrink_the_denominator() -> None:
    """The cohort of 30 stays the divisor when two thirds send nothing usable."""

    def empty(content: RecordDict) -> None:
        del content["arrays"]

    grid = FakeGrid(app(), NODES, faults=dict.fromkeys(range(10, NODES), replies(empty)))
    moved = ndarrays(strategy(FedAvg, privacy=central(1e-6)).start(grid, model(), 1).arrays)["w"]
    np.testing.assert_allclose(moved, -sum(update(k) for k in range(10)) / NODES, atol=1e-6)


def test_secret_cohorts_are_not_those_of_the_seed() -> None:
    grid = FakeGrid(app(), NODES)
    secret = CentralPrivacy(1.0, 1e-5, noise_multiplier=1.0, sampling="poisson")
    rows = metrics_of(strategy(privacy=secret, fraction_train=0.5), grid, 6)
    assert len({row["clients"] for row in rows}) > 1
    expected = epsilon(1.0, 6, 1e-5, sampling="poisson", clients=NODES, cohort=15)
    assert rows[-1]["epsilon"] == expected


def set_online(grid: FakeGrid, count: int) -> None:
    """Only the first nodes are there."""
    for position, node in enumerate(grid.nodes):
        node.online = position < count


def spent_by(mechanism_noise: float, rounds: int, **population: Any) -> float:
    return epsilon(mechanism_noise, rounds, 1e-5, sampling="fixed", **population)


def test_the_cohort_that_is_drawn_is_the_one_that_is_charged() -> None:
    """A strategy that would take all 100 clients, with a divisor of 5, and without one."""
    few = central(1.0, sampling="fixed", cohort=5)
    rows = metrics_of(strategy(FedAvg, privacy=few), FakeGrid(app(), 100), 10)
    assert {row["clients"] for row in rows} == {5}
    assert rows[-1]["epsilon"] == spent_by(1.0, 10, clients=100, cohort=5)
    every = central(1.0, sampling="fixed")
    rows = metrics_of(strategy(FedAvg, privacy=every), FakeGrid(app(), 100), 10)
    assert {row["clients"] for row in rows} == {100}
    assert rows[-1]["epsilon"] == pytest.approx(46.2, abs=0.1)


def test_cohorts_of_fixed_size_cost_more_when_nodes_leave() -> None:
    """10 of 100 clients in round 1, then 10 of the 10 that are left."""
    grid = FakeGrid(app(), 100)
    private = strategy(
        FedAvg, fraction_train=0.1, min_train_nodes=10, privacy=central(1.0, sampling="fixed")
    )
    result = private.start(
        grid, model(), 20, evaluate_fn=lambda round, arrays: set_online(grid, 10 if round else 100)
    )
    rows: Any = result.train_metrics_clientapp
    spent = [rows[round]["epsilon"] for round in (1, 20)]
    assert spent[0] == spent_by(1.0, 1, clients=100, cohort=10)
    assert spent[1] > epsilon(0.5, 19, 1e-5) > 74


@pytest.mark.parametrize("sampling", ["known", "fixed"])
def test_nodes_that_join_do_not_lengthen_the_steps(
    sampling: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten nodes at the start, a hundred later: ten take part, and the divisor is ten."""
    grid, seen = FakeGrid(app(), 100), list[NDArray[Any]]()
    set_online(grid, 10)

    def look(round: int, arrays: ArrayRecord) -> None:
        seen.append(weights(arrays))
        set_online(grid, 100 if round else 10)

    private = strategy(FedAvg, privacy=central(1e-6, sampling=sampling))
    result = private.start(grid, model(), 2, evaluate_fn=look)
    assert [result.train_metrics_clientapp[round]["clients"] for round in (1, 2)] == [10, 10]
    cohort = [position for kind, position in grid.sent if kind == "train"][10:]
    mean = np.mean([update(client) for client in cohort], axis=0)
    np.testing.assert_allclose(seen[2] - seen[1], -mean, atol=1e-5)
    assert "capped at 10 of 100" in caplog.text


def test_poisson_probability_falls_when_nodes_join_and_is_charged_so() -> None:
    """5 of 10 clients on average, then 5 of 100."""
    grid = FakeGrid(app(), 100)
    set_online(grid, 10)

    def look(round: int, arrays: ArrayRecord) -> None:
        set_online(grid, 100 if round >= 2 else 10)

    private = strategy(FedAvg, fraction_train=0.5, privacy=central(2.0, sampling="poisson"))
    rows = private.start(grid, model(), 12, evaluate_fn=look).train_metrics_clientapp
    charged = {Release(2.0, "poisson", 10, 5): 2, Release(2.0, "poisson", 100, 5): 10}
    assert rows[12]["epsilon"] == composed_epsilon(charged, 1e-5)
    assert np.mean([rows[round]["clients"] for round in range(3, 13)]) < 12


def test_an_empty_cohort_is_noised_and_charged() -> None:
    """N = 10, M = 1: about a third of the cohorts are empty, and no model shows which."""
    seen: list[NDArray[Any]] = []
    coins = central(2.0, sampling="poisson", cohort=1)
    rows = (
        strategy(FedAvg, privacy=coins, max_empty_rounds=1)
        .start(
            FakeGrid(app(), 10),
            model(),
            20,
            evaluate_fn=lambda round, arrays: seen.append(weights(arrays)),
        )
        .train_metrics_clientapp
    )
    empty = [round for round in range(1, 21) if rows[round]["clients"] == 0]
    assert empty
    moved = np.diff(np.stack(seen), axis=0)
    assert all(moved[round - 1].std() == pytest.approx(2.0, rel=0.2) for round in empty)
    spent = epsilon(2.0, 20, 1e-5, sampling="poisson", clients=10, cohort=1)
    assert rows[20]["epsilon"] == spent


def test_a_round_without_a_usable_reply_is_noised_and_charged() -> None:
    seen: list[NDArray[Any]] = []
    grid = FakeGrid(app(scale=math.nan), NODES)
    private = strategy(FedAvg, privacy=central(3.0), max_empty_rounds=3)
    rows = private.start(
        grid, model(), 2, evaluate_fn=lambda round, arrays: seen.append(weights(arrays))
    ).train_metrics_clientapp
    assert [rows[round]["clients"] for round in (1, 2)] == [0, 0]
    for moved in np.diff(np.stack(seen), axis=0):
        assert moved.std() == pytest.approx(3.0 / NODES, rel=0.2)
    assert rows[2]["epsilon"] == epsilon(3.0, 2, 1e-5)
    with pytest.raises(NoRepliesError):  # the third releases nothing
        private.start(grid, model(), 3)


def test_a_client_of_two_nodes_is_drawn_once() -> None:
    """For a minute Flower lists a node that was restarted twice; its sensitivity is not double."""
    named = app()
    report_client_id(named)
    grid = FakeGrid(named, [{"partition-id": k} for k in (0, 1, 2, 2)])
    (row,) = metrics_of(strategy(FedAvg, privacy=central(1.0)), grid)
    assert row["clients"] == 3


def test_a_secret_cohort_depends_on_nothing_but_its_draw() -> None:
    """A node that was silent is passed over next time, but not where the draw is to be secret."""
    for sampling, expected in (("known", 1), ("fixed", 2)):
        grid = FakeGrid(app(), 3, faults={1: only(silent)})
        private = strategy(FedAvg, privacy=central(1.0, sampling=sampling))
        private.start(grid, model(), 2, timeout=0.2)
        assert grid.sent.count(("train", 1)) == expected


class Greedy(FedAvg):
    """Asks the nodes of a round twice."""

    def configure_train(self, *args: Any) -> Any:
        messages = list(super().configure_train(*args))
        again = [Message(m.content, m.metadata.dst_node_id, "train") for m in messages]
        return messages + again


def test_replies_beyond_the_cohort_that_was_drawn_are_refused() -> None:
    with pytest.raises(UsageError, match="one reply from each client of the cohort"):
        strategy(Greedy, privacy=central(1.0)).start(FakeGrid(app(), 3), model(), 1)
    private, grid = strategy(FedAvg, privacy=central(1.0)), FakeGrid(app(), 3)
    private.start(grid, model(), 1)
    before = weights(private.run.output()) if private.run else None
    content = RecordDict({"arrays": model(), "config": ConfigRecord()})
    messages = [Message(content, node, "train") for node in grid.get_node_ids()]
    with pytest.raises(UsageError, match="once for every aggregate_train"):
        private.aggregate_train(2, grid.send_and_receive(messages))
    assert private.run is not None
    np.testing.assert_array_equal(weights(private.run.output()), before)


def test_a_run_stops_before_its_epsilon_is_exceeded(tmp_path: Path) -> None:
    """Four rounds for epsilon 2, of which five attempts at the last are lost: 3.16 in all."""
    lost = 0

    def look(round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal lost
        if round == 3 and lost < 5:
            lost += 1
            raise KeyboardInterrupt
        return MetricRecord({"round": round})

    def run() -> Any:
        promised = CentralPrivacy(clip=1.0, delta=1e-5, epsilon=2.0)
        private = strategy(FedAvg, privacy=promised, checkpoint=tmp_path / "run")
        return private.start(FakeGrid(app(), NODES), model(), 4, evaluate_fn=look)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run()
    result = run()
    assert lost == 2
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    stored = json.loads((tmp_path / "run" / "checkpoint-releases.json").read_bytes())["releases"]
    assert sum(row["count"] for row in stored) == 4
    z = stored[0]["noise_multiplier"]
    assert epsilon(z, 4, 1e-5) == pytest.approx(2.0)
    assert epsilon(z, 9, 1e-5) == pytest.approx(3.16, abs=0.01)
    assert sorted(run().train_metrics_clientapp) == [1, 2]  # the run is over


def test_a_run_whose_first_round_used_up_its_epsilon_returns_the_initial_model(
    tmp_path: Path,
) -> None:
    def look(round: int, arrays: ArrayRecord) -> None:
        if round == 1:
            raise KeyboardInterrupt

    def run() -> Any:
        promised = CentralPrivacy(clip=1.0, delta=1e-5, epsilon=2.0)
        private = strategy(FedAvg, privacy=promised, checkpoint=tmp_path / "run")
        return private.start(FakeGrid(app(), NODES), model(), 1, evaluate_fn=look)

    with pytest.raises(KeyboardInterrupt):
        run()
    np.testing.assert_array_equal(weights(run().arrays), 0.0)


def test_a_run_ends_early_where_nodes_leave_and_rounds_cost_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Planned for 10 of 100 clients; from round 3 on all 10 that are left take part."""
    grid = FakeGrid(app(), 100)
    promised = CentralPrivacy(1.0, 1e-5, epsilon=4.0, sampling="fixed", noise_seed=0)
    private = strategy(FedAvg, fraction_train=0.1, min_train_nodes=10, privacy=promised)
    result = private.start(
        grid,
        model(),
        20,
        evaluate_fn=lambda round, arrays: set_online(grid, 10 if round >= 2 else 100),
    )
    rows: Any = result.train_metrics_clientapp
    assert 2 <= len(rows) < 20
    assert rows[len(rows)]["epsilon"] <= 4.0
    assert "a further round would cost epsilon" in caplog.text


@pytest.mark.parametrize("damage", [None, b"", b'{"releases": 2}', b'{"releases": []}', b"[1]"])
def test_a_run_whose_account_is_lost_is_not_resumed(tmp_path: Path, damage: bytes | None) -> None:
    def look(round: int, arrays: ArrayRecord) -> None:
        if round == 2:
            raise KeyboardInterrupt

    def run() -> None:
        private = strategy(FedAvg, privacy=central(2.0), checkpoint=tmp_path / "run")
        private.start(FakeGrid(app(), 3), model(), 3, evaluate_fn=look)

    with pytest.raises(KeyboardInterrupt):
        run()
    account = tmp_path / "run" / "checkpoint-releases.json"
    if damage is None:
        account.unlink()
    else:
        account.write_bytes(damage)
    with pytest.raises(UsageError, match="start over in another folder"):
        run()


def test_a_run_that_died_is_charged_for_what_it_may_have_shown(tmp_path: Path) -> None:
    """Round 2 was released and lost: the resumed run makes it again, with other noise, and pays."""
    privacy = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0)
    seen: list[NDArray[Any]] = []

    def look(round: int, arrays: ArrayRecord) -> MetricRecord:
        if round == 2:
            seen.append(ndarrays(arrays)["w"].copy())
            if len(seen) == 1:
                raise KeyboardInterrupt
        return MetricRecord({"round": round})

    def run() -> Any:
        private = strategy(FedAvg, privacy=privacy, checkpoint=tmp_path / "run")
        return private.start(FakeGrid(app(), NODES), model(), 3, evaluate_fn=look)

    with pytest.raises(KeyboardInterrupt):
        run()
    spent = run().train_metrics_clientapp
    assert spent[1]["epsilon"] == pytest.approx(epsilon(2.0, 1, 1e-5))
    assert spent[3]["epsilon"] == pytest.approx(epsilon(2.0, 4, 1e-5))
    assert not np.array_equal(seen[0], seen[1])


class Averaging(FedAvg):
    """A subclass that averages replies itself, as with Flower; after the step or without."""

    steps_first = False

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        held = list(replies)
        metrics = super().aggregate_train(server_round, held)[1] if self.steps_first else None
        exact = np.mean([weights(reply.content.array_records["arrays"]) for reply in held], axis=0)
        return ArrayRecord({"w": Array(exact), "n": Array(np.array(3))}), metrics


@pytest.mark.parametrize("steps_first", [False, True])
def test_a_subclass_cannot_release_means_without_noise(steps_first: bool, tmp_path: Path) -> None:
    """Its model became that of the run, exact to the last bit, and epsilon was reported for it."""
    made = strategy(Averaging, privacy=central(1.0), checkpoint=tmp_path / "run")
    vars(made)["steps_first"] = steps_first
    seen: list[NDArray[Any]] = []
    with pytest.raises(UsageError, match="with central privacy return that one unchanged"):
        made.start(
            FakeGrid(app(), NODES),
            model(),
            2,
            evaluate_fn=lambda round, arrays: seen.append(weights(arrays)),
        )
    assert [value.any() for value in seen] == [False]  # the first model, and no other
    assert made.run is not None
    assert made.run.ledger.count == steps_first
    assert released(tmp_path / "run") == steps_first


def test_a_subclass_may_average_what_clients_have_noised() -> None:
    settings = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0, noise_seed=0)
    grid = FakeGrid(app([local_privacy(settings)]), 3)
    strategy(Averaging, privacy=settings).start(grid, model(), 2)


def released(folder: Path) -> int:
    """How many releases the account of a run has."""
    path = folder / "checkpoint-releases.json"
    if not path.exists():
        return 0
    return sum(row["count"] for row in json.loads(path.read_bytes())["releases"])


def test_a_first_round_that_ends_in_an_error_stays_charged(tmp_path: Path) -> None:
    """The folder of a run without rounds was removed after a mistake, and its account with it."""

    def mistaken(round: int, arrays: ArrayRecord) -> None:
        if round:
            raise UsageError("the evaluation has no data; give it some")

    for expected in (1, 2):
        with pytest.raises(UsageError, match="no data"):
            strategy(privacy=central(1.0), checkpoint=tmp_path / "run").start(
                FakeGrid(app(), NODES), model(), 2, evaluate_fn=mistaken
            )
        assert released(tmp_path / "run") == expected
    with pytest.raises(UsageError, match="no data"):  # without an account nothing is left behind
        strategy(checkpoint=tmp_path / "other").start(
            FakeGrid(app(), NODES), model(), 2, evaluate_fn=mistaken
        )
    assert not (tmp_path / "other").exists()


def test_a_diverged_run_gets_no_budget_back(tmp_path: Path) -> None:
    """Every start repeats rounds, from an earlier checkpoint the third time, and pays for each."""

    def diverges(round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": math.inf if round == 3 else 1.0})

    def start(**options: Any) -> Any:
        limited = CentralPrivacy(clip=1.0, delta=1e-5, epsilon=4.0, noise_seed=0)
        made = strategy(FedAvg, privacy=limited, checkpoint=tmp_path / "run")
        return made.start(FakeGrid(app(), NODES), model(), 7, **options)

    for spent in (3, 4, 6):
        with pytest.raises(DivergedError, match="round 3"):
            start(evaluate_fn=diverges)
        assert released(tmp_path / "run") == spent
    rows = start(evaluate_fn=lambda round, arrays: None).train_metrics_clientapp
    assert released(tmp_path / "run") == 7
    assert max(row["epsilon"] for row in rows.values()) == pytest.approx(4.0, rel=1e-3)
    assert (
        len(rows) < 7
    )  # it ended early: the budget was for seven releases, repeated ones included


def test_a_run_is_not_resumed_with_other_privacy(tmp_path: Path) -> None:
    def run(clip: float) -> None:
        private = CentralPrivacy(clip=clip, delta=1e-5, noise_multiplier=2.0)
        strategy(privacy=private, checkpoint=tmp_path / "run").start(FakeGrid(app(), 3), model(), 1)

    run(1.0)
    with pytest.raises(UsageError, match=r"privacy\.clip"):
        run(2.0)


@pytest.mark.parametrize(
    ("rule", "options", "arrays", "remedy"),
    [
        (FedExP, {}, model_with_buffers(), "BatchNorm"),
        (FedExP, {"weighting": "num-examples"}, model(), "uniform weights"),
        (ScaffoldExP, {}, model(), "control variates"),
    ],
)
def test_what_is_not_covered_is_refused(
    rule: Any, options: Any, arrays: ArrayRecord, remedy: str
) -> None:
    for privacy in (central(1.0), LocalPrivacy(1.0, 1e-5, noise_multiplier=1.0)):
        with pytest.raises(UsageError, match=remedy):
            rule(privacy=privacy, fraction_evaluate=0.0, **options).start(
                FakeGrid(plain_app(), 3), arrays, 1
            )
