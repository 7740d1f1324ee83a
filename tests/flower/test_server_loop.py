"""The loop over rounds: models that a subclass returns, and runs that diverge."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import DEFAULT_TTL, Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

import fedexp as fx
from fedexp.errors import DivergedError, UsageError
from fedexp.flower import (
    FedAvg,
    FedExP,
    RuleStrategy,
    initial_arrays,
)
from fedexp.flower.layout import ndarrays
from fedexp.flower.server import GRACE
from fedexp.privacy import CentralPrivacy
from fedexp.runs import load_run
from tests.flower.helpers import private
from tests.flower.helpers.fake_grid import (
    FakeGrid,
    only,
    replies,
    with_array,
)
from tests.flower.helpers.plain_app import DIM, first_model, plain_app
from tests.flower.helpers.user_app import (
    simulated_app,
)
from tests.helpers.problems import least_squares

ROUNDS = 4
TASK = least_squares(clients=4, dim=8)


class Halved(FedAvg):
    """What people write: the model of the round, changed."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        arrays["w"] = Array(0.5 * arrays["w"].numpy())  # in place, which is easily overlooked
        return arrays, metrics


class Own(FedExP):
    """An aggregation without ours."""

    result: Any = None

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        list(replies)
        return self.result, None


class Discarding(FedExP):
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return None, super().aggregate_train(server_round, replies)[1]


def test_arrays_that_a_subclass_returns_are_the_model(tmp_path: Path) -> None:
    """As they are in Flower: evaluated, returned, trained from, and checkpointed."""

    def start() -> Any:
        strategy = Halved(fraction_evaluate=0.0, checkpoint=tmp_path / "run")
        return strategy.start(FakeGrid(plain_app(), 3), first_model(), 3)

    ours = start()

    class Theirs(FlowerFedAvg):
        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            arrays["w"] = Array(0.5 * arrays["w"].numpy())
            return arrays, metrics

    theirs = Theirs(fraction_evaluate=0.0).start(FakeGrid(plain_app(), 3), first_model(), 3)
    for name in ("w", "bn.running_mean"):
        np.testing.assert_allclose(
            ndarrays(ours.arrays)[name], ndarrays(theirs.arrays)[name], rtol=1e-6, atol=1e-7
        )
    stored = start()
    np.testing.assert_array_equal(ndarrays(stored.arrays)["w"], ndarrays(ours.arrays)["w"])


class Copied(FedExP):
    """Returns the same values in other objects, which changes nothing."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        copies = {n: np.array(v.numpy(), order="F") for n, v in arrays.items()}
        return ArrayRecord({name: Array(value) for name, value in copies.items()}), metrics


def test_copies_of_the_arrays_are_not_another_model() -> None:
    """Taken as one, the mean of two iterates would become the next."""
    model = ArrayRecord({**first_model(), "m": Array(np.ones((2, 3), np.float32))})
    ends = []
    for strategy in (FedExP, Copied):
        faults = dict.fromkeys(
            range(3), only(replies(with_array("m", np.ones((2, 3), np.float32))))
        )
        grid = FakeGrid(plain_app(), 3, faults=faults)
        ends.append(strategy(eps=0.0, fraction_evaluate=0.0).start(grid, model, ROUNDS).arrays)
    np.testing.assert_array_equal(ndarrays(ends[0])["w"], ndarrays(ends[1])["w"])


def test_custom_aggregation_still_counts_rounds(tmp_path: Path) -> None:
    strategy = Own(fraction_evaluate=0.0, checkpoint=tmp_path / "run")
    strategy.result = ArrayRecord({**first_model(), "w": Array(np.full(DIM, 2.0, np.float32))})
    result = strategy.start(FakeGrid(plain_app(), 3), first_model(), 2)
    assert ndarrays(result.arrays)["w"].tolist() == [2.0] * DIM
    assert [row["round"] for row in load_run(tmp_path / "run").rows] == [1, 2]


def test_arrays_of_another_model_and_discarded_steps_are_refused() -> None:
    strategy = Own(fraction_evaluate=0.0)
    strategy.result = ArrayRecord({"v": Array(np.zeros(1, np.float32))})
    with pytest.raises(UsageError, match="arrays that are not the model's: it has no array 'w'"):
        strategy.start(FakeGrid(plain_app(), 3), first_model(), 2)
    with pytest.raises(UsageError, match="returned no arrays, although"):
        Discarding().start(FakeGrid(plain_app(), 3), first_model(), 2)


class Twice(FedExP):
    """Looks at the replies before it passes them on; they are streamed, and gone then."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert len(replies) == 3  # type: ignore[arg-type]
        assert all(reply.has_content() for reply in replies)
        return super().aggregate_train(server_round, replies)


class TwiceEvaluated(FedExP):
    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        assert all(reply.has_content() for reply in replies)
        return super().aggregate_evaluate(server_round, replies)


@pytest.mark.parametrize("make", [Twice, TwiceEvaluated])
def test_replies_that_are_read_twice_are_refused(make: type[FedExP]) -> None:
    """The second time there were none, so that nothing was trained or evaluated."""
    with pytest.raises(UsageError, match=r"read once.*replies = list\(replies\)"):
        make().start(FakeGrid(plain_app(), 3), first_model(), 2)


def test_replies_that_are_read_twice_cost_no_epsilon() -> None:
    """Nothing of them is released; pure noise was, and charged."""
    settings = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
    made = Twice(fraction_evaluate=0.0, privacy=settings)
    with pytest.raises(UsageError, match="read once"):
        made.start(FakeGrid(private.app(), 3), private.model(), 2)
    assert made.run is not None
    assert made.run.ledger.count == 0


class Skips(RuleStrategy):
    """A subclass that leaves the second round out."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        if server_round == 2:
            list(replies)
            return None, None
        return super().aggregate_train(server_round, replies)


def test_a_round_that_a_subclass_skips_accepts_no_client_state(tmp_path: Path) -> None:
    """Its row repeated the names of the round before, so clients resumed from states never used."""
    made = Skips(algorithm=fx.scaffold(), fraction_evaluate=0.0, checkpoint=tmp_path / "run")
    made.start(FakeGrid(simulated_app(TASK), 4), initial_arrays(TASK), num_rounds=3)
    assert [len(row.get("accepted", ())) for row in load_run(tmp_path / "run").rows] == [4, 0, 4]


class Idle(FedAvg):
    """Sends no messages in some rounds, with and without a cohort that was drawn."""

    def configure_train(self, server_round: int, *args: Any) -> Any:
        if server_round in (2, 3):
            return []
        messages = list(super().configure_train(server_round, *args))
        return [] if 3 < server_round < 8 else messages


def test_a_round_without_messages_is_not_one_without_replies() -> None:
    """Three such rounds in a row ended the run with "no usable reply"."""
    made = Idle(fraction_evaluate=0.0)
    result = made.start(FakeGrid(plain_app(), 3), first_model(), 8)
    clients = [row["clients"] for row in result.train_metrics_clientapp.values()]
    assert clients == [3, 0, 0, 0, 0, 0, 0, 3]
    expected = FedAvg(fraction_evaluate=0.0).start(FakeGrid(plain_app(), 3), first_model(), 2)
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], ndarrays(expected.arrays)["w"])


def test_no_rounds_evaluate_the_initial_model_as_in_flower(tmp_path: Path) -> None:
    def start(strategy: Any, rounds: int) -> Any:
        return strategy.start(
            FakeGrid(plain_app(), 3),
            first_model(),
            num_rounds=rounds,
            evaluate_fn=lambda round, arrays: MetricRecord({"loss": float(round)}),
        )

    made = FedExP(checkpoint=tmp_path / "run")
    result, other = start(made, 0), start(FlowerFedAvg(), 0)
    assert result.evaluate_metrics_serverapp == other.evaluate_metrics_serverapp
    assert result.train_metrics_clientapp == other.train_metrics_clientapp == {}
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], ndarrays(first_model())["w"])
    assert [*start(made, 2).train_metrics_clientapp] == [1, 2]  # nothing was stored


def test_without_a_timeout_messages_live_as_long_as_flowers() -> None:
    lifetimes = []
    for strategy in (FedAvg(), FlowerFedAvg()):
        grid = FakeGrid(plain_app(), 3)
        grid.taps.append(lambda message: lifetimes.append(message.metadata.ttl))
        result = strategy.start(grid, first_model(), num_rounds=1, timeout=None)  # type: ignore[arg-type]
        assert result.train_metrics_clientapp.keys() == {1}
    assert max(lifetimes) == pytest.approx(DEFAULT_TTL, abs=GRACE)


def test_a_model_that_diverges_ends_the_run_with_its_round() -> None:
    with pytest.raises(
        DivergedError, match=r"round 2.*learning rate.*or set bound or max_norm"
    ) as raised:
        FedAvg(lr=1e12).start(FakeGrid(plain_app(), 3), first_model(), 2)
    assert "local.clip_norm" not in str(raised.value)  # which Flower's clients do not have
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_losses_that_are_not_finite_undo_a_step_and_end_the_run_after_three(
    lines: list[str],
) -> None:
    models: dict[int, Any] = {}

    def evaluate(bad: set[int], round: int, arrays: ArrayRecord) -> MetricRecord:
        models[round] = ndarrays(arrays)["w"]
        return MetricRecord({"loss": float("nan") if round in bad else 1.0})

    def start(*bad: int, rounds: int = 4) -> Any:
        function = partial(evaluate, set(bad))
        strategy = FedAvg(1.0, 1.0, 1, 1, 1)  # a single node cannot be left out
        return strategy.start(FakeGrid(plain_app(), 1), first_model(), rounds, evaluate_fn=function)

    start(rounds=3)
    undisturbed = dict(models)
    start(2, rounds=4)
    np.testing.assert_array_equal(models[3], undisturbed[2])
    np.testing.assert_array_equal(models[4], undisturbed[3])
    assert any(
        "round 2 diverged (test_loss is nan)" in line and "left out" in line for line in lines
    )
    with pytest.raises(DivergedError, match="round 4: test_loss is nan"):
        start(2, 3, 4, 5, rounds=6)


def test_evaluations_are_every_k_rounds_and_after_the_last(tmp_path: Path) -> None:
    def start(rounds: int, **options: Any) -> Any:
        grid, strategy = FakeGrid(plain_app(), 3), FedExP(**options)
        function = lambda round, arrays: MetricRecord({"test_loss": float(round)})  # noqa: E731
        return strategy.start(grid, first_model(), rounds, evaluate_fn=function)

    sparse = start(5, evaluate_every=2, checkpoint=tmp_path / "run")
    assert [*sparse.evaluate_metrics_clientapp] == [2, 4, 5]
    assert [*sparse.evaluate_metrics_serverapp] == [0, 2, 4, 5]
    rows = load_run(tmp_path / "run").rows
    assert [row["test_loss"] for row in rows] == [None, 2.0, None, 4.0, 5.0]
    assert load_run(tmp_path / "run").spec["evaluate_every"] == 2
    usual = start(5)
    assert [*usual.evaluate_metrics_clientapp] == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(ndarrays(sparse.arrays)["w"], ndarrays(usual.arrays)["w"])
