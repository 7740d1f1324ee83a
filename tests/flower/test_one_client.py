"""What a single client can do to a run: nothing that outlasts its reply, where it is bounded."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedexp.cli.main import main
from fedexp.errors import DivergedError, UsageError
from fedexp.flower import (
    FedAvg,
    FedExP,
    FedProx,
    Scaffold,
    SecureAggregation,
    identify,
    initial_arrays,
    planned,
)
from fedexp.flower.layout import ndarrays
from fedexp.flower.replies import Tally
from fedexp.flower.training import NoRepliesError
from fedexp.privacy import CentralPrivacy
from fedexp.runs import load_run
from tests.flower.fake_grid import Answer, FakeGrid, only, raises, replies
from tests.flower.plain_app import DIM, first_model, plain_app
from tests.flower.test_replies import Ear, with_array, with_metric
from tests.helpers.problems import least_squares

BAD, ROUNDS = 1, 4
HUGE = replies(with_array("w", np.full(DIM, 1e12, np.float32)))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    ear = Ear()
    logging.getLogger("flwr").addHandler(ear)
    yield ear.heard
    logging.getLogger("flwr").removeHandler(ear)


@pytest.mark.parametrize(("loss", "examples"), [(1e300, 10**10), (1e308, 20), (-1e308, 20)])
def test_a_huge_evaluation_ends_no_run(loss: float, examples: int) -> None:
    def change(content: RecordDict) -> None:
        content.metric_records["metrics"].update({"loss": loss, "num-examples": examples})

    fault = only(replies(change), kind="evaluate")
    grid = FakeGrid(plain_app(), 3, faults={BAD: fault, 2: only(replies(change), kind="evaluate")})
    result = FedExP().start(grid, first_model(), 2)
    measured: Any = result.evaluate_metrics_clientapp[2]["loss"]
    assert np.isfinite(measured)
    assert 0.5 < measured / loss <= 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0, float("nan")]])
def test_an_evaluation_that_is_not_finite_is_left_out_with_a_line(
    value: Any, lines: list[str]
) -> None:
    fault = only(replies(with_metric("loss", value)), kind="evaluate")
    grid = FakeGrid(plain_app(), 3, faults={BAD: fault})
    result = FedAvg().start(grid, first_model(), 1)
    others = FakeGrid(plain_app(), 3, faults={BAD: only(raises, kind="evaluate")})
    expected = FedAvg().start(others, first_model(), 1)
    assert dict(result.evaluate_metrics_clientapp[1]) == dict(
        expected.evaluate_metrics_clientapp[1]
    )
    named = [line for line in lines if str(grid.nodes[BAD].node_id) in line]
    assert len([line for line in named if "'loss' is not a finite number" in line]) == 1


def test_means_of_the_largest_numbers_are_finite() -> None:
    largest, tally = float(np.finfo(np.float64).max), Tally("n")
    for weight in (1, 3, 7):
        assert tally.add({"n": weight, "loss": largest, "both": [-largest, largest]}) == []
    assert tally.add({"n": 1, "loss": float("inf"), "both": [0.0, 1.0]}) == ["loss"]
    means: Any = tally.means()
    assert means["loss"] == pytest.approx(largest)
    assert np.isfinite(means["both"]).all()


def test_an_own_function_that_returns_nan_ends_no_run() -> None:
    def worst(records: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({"loss": float("nan")})

    strategy = FedAvg(evaluate_metrics_aggr_fn=worst)
    result = strategy.start(FakeGrid(plain_app(), 3), first_model(), 2)
    assert result.evaluate_metrics_clientapp.keys() == {1, 2}


def test_an_update_beyond_the_bound_is_left_out(lines: list[str]) -> None:
    grid = FakeGrid(plain_app(), 4, faults={BAD: only(HUGE)})
    result = FedExP(max_norm=100.0).start(grid, first_model(), 2)
    others = [{"partition-id": k} for k in range(4) if k != BAD]
    expected = FedExP().start(FakeGrid(plain_app(), others), first_model(), 2)
    np.testing.assert_allclose(ndarrays(result.arrays)["w"], ndarrays(expected.arrays)["w"])
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["clients"], metrics["dropped"]) == (3, 1)
    assert any("2.24e+12, more than max_norm=100" in line for line in lines)


def test_a_diverged_folder_resumes_from_its_last_good_state(
    tmp_path: Path, lines: list[str]
) -> None:
    folder = tmp_path / "run"
    grid = FakeGrid(plain_app(), 3, faults={BAD: only(HUGE, rounds=[3])})
    with pytest.raises(DivergedError, match="round 3"):
        FedExP(checkpoint=folder).start(grid, first_model(), ROUNDS)
    assert any(
        f"that of node {grid.nodes[BAD].node_id}, with a norm of 2.24e+12; max_norm" in line
        for line in lines
    )
    assert json.loads((folder / "checkpoint.json").read_bytes())["round"] == 2
    lines.clear()
    result = FedExP(checkpoint=folder).start(FakeGrid(plain_app(), 3), first_model(), ROUNDS)
    whole = FedExP().start(FakeGrid(plain_app(), 3), first_model(), ROUNDS)
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], ndarrays(whole.arrays)["w"])
    assert [line for line in lines if "diverged at round 3" in line and "of round 2" in line]
    assert load_run(folder).result["status"] == "finished"  # type: ignore[index]


@pytest.mark.parametrize("asked", [False, True])
def test_one_that_diverges_again_from_there_resumes_one_checkpoint_further_back(
    asked: bool, tmp_path: Path, lines: list[str]
) -> None:
    """`fedexp resume --reopen` before a start changes nothing: both are one mechanism."""
    folder = tmp_path / "run"
    for resumed in (0, 3, 2):
        lines.clear()
        grid = FakeGrid(plain_app(), 3, faults={BAD: only(HUGE, rounds=[4])})
        with pytest.raises(DivergedError, match="round 4"):
            FedExP(checkpoint=folder).start(grid, first_model(), 5)
        warned = [line for line in lines if "resuming from its last good state" in line]
        assert len(warned) == (0 if asked or not resumed else 1)
        if asked:
            assert main(["resume", str(folder), "--reopen"]) == 0
    noted = load_run(folder).environment
    assert [each["round"] for each in noted["resumed"]] == [3, 2]
    assert [each["round"] for each in noted["reopened"]] == ([3, 2, 2] if asked else [3, 2])


def test_a_run_that_diverged_at_once_restarts(tmp_path: Path) -> None:
    for faults in ({BAD: only(HUGE, rounds=[1])}, {}):
        grid = FakeGrid(plain_app(), 3, faults=faults)
        with pytest.raises(DivergedError) if faults else nullcontext():
            FedExP(checkpoint=tmp_path / "run").start(grid, first_model(), 2)
    assert len(load_run(tmp_path / "run").rows) == 2


def test_buffers_that_overflow_are_never_checkpointed(tmp_path: Path) -> None:
    """Each of them is finite; their float32 sum is not."""
    large = replies(with_array("bn.running_mean", np.full(1, 3e38, np.float32)))
    grid = FakeGrid(plain_app(), 3, faults=dict.fromkeys(range(3), only(large, rounds=[2])))
    with pytest.raises(DivergedError, match="round 2: a buffer"):
        FedExP(checkpoint=tmp_path / "run").start(grid, first_model(), 3)
    assert json.loads((tmp_path / "run" / "checkpoint.json").read_bytes())["round"] == 1


def test_a_round_with_too_few_replies_leaves_the_model(lines: list[str]) -> None:
    faults = {k: only(raises, rounds=[2]) for k in (0, 1)}
    grid = FakeGrid(plain_app(), 3, faults=faults)
    result = FedAvg(min_replies=2).start(grid, first_model(), 3)
    expected = FedAvg().start(FakeGrid(plain_app(), 3), first_model(), 2)
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], ndarrays(expected.arrays)["w"])
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["clients"], metrics["dropped"]) == (0, 3)
    assert any("1 usable replies of 2 needed" in line for line in lines)
    with pytest.raises(NoRepliesError, match="3 rounds in a row"):
        FedAvg(min_replies=4).start(FakeGrid(plain_app(), 3), first_model(), 4)


def test_scaffolds_clients_go_back_where_too_few_replied() -> None:
    task = least_squares(clients=3)
    app = ClientApp()
    app.train()(planned(task))
    identify(app)
    grid = FakeGrid(app, 3, faults={1: only(raises, rounds=[2])})
    heard: list[Any] = []

    def tap(message: Message) -> None:
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        if (kind, node) == ("train", grid.nodes[0].node_id):
            heard.append(message.content.config_records["config"]["fedexp.accepted"])

    grid.taps.append(tap)
    Scaffold(fraction_evaluate=0.0, min_replies=3).start(grid, initial_arrays(task), 3)
    assert heard == [0, 1, 1]


def test_bounds_that_cannot_hold_are_refused() -> None:
    with pytest.raises(UsageError, match="max_norm needs updates that the server sees"):
        FedExP(max_norm=1.0, secure=SecureAggregation(clip=1.0))
    privacy = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
    with pytest.raises(UsageError, match="min_replies would decide by the data"):
        FedExP(fraction_evaluate=0.0, min_replies=2, privacy=privacy)


def test_replies_in_float64_are_cast() -> None:
    def widen(content: RecordDict) -> None:
        arrays = content.array_records["arrays"]
        for name in ("w", "bn.running_mean"):
            arrays[name] = Array(arrays[name].numpy().astype(np.float64))

    grid = FakeGrid(plain_app(), 3, faults=dict.fromkeys(range(3), only(replies(widen))))
    result = FedExP().start(grid, first_model(), 2)
    expected = FedExP().start(FakeGrid(plain_app(), 3), first_model(), 2)
    for name, value in ndarrays(expected.arrays).items():
        np.testing.assert_array_equal(ndarrays(result.arrays)[name], value)
        assert ndarrays(result.arrays)[name].dtype == value.dtype


def test_plain_clients_are_asked_nothing_that_they_do_not_know() -> None:
    grid = FakeGrid(plain_app(), 4)
    FedExP(fraction_train=0.5, min_available_nodes=4).start(grid, first_model(), 2)
    assert {kind for kind, _ in grid.sent} == {"train", "evaluate"}


def test_the_weight_of_a_client_is_the_metric_that_is_named() -> None:
    def weigh(message: Message, answer: Answer) -> Message | None:
        reply = answer()
        metrics = reply.content.metric_records["metrics"]
        metrics["share"] = 1.0 / float(metrics.pop("num-examples"))  # type: ignore[arg-type]
        return reply

    def grid() -> FakeGrid:
        return FakeGrid(plain_app(), 3, faults=dict.fromkeys(range(3), weigh))

    ours = FedAvg(weighted_by_key="share").start(grid(), first_model(), 2)
    theirs = FlowerFedAvg(weighted_by_key="share").start(grid(), first_model(), 2)
    mine, other = ndarrays(ours.arrays)["w"], ndarrays(theirs.arrays)["w"]
    np.testing.assert_allclose(mine, other, rtol=1e-6)


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


def test_an_aggregation_of_its_own_keeps_count_of_rounds(tmp_path: Path) -> None:
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


def test_fedprox_with_a_plain_client_is_not_taken_for_fedprox(lines: list[str]) -> None:
    grid, heard = FakeGrid(plain_app(), 3), list[Any]()
    grid.taps.append(lambda m: heard.append(m.content.config_records.get("config", {})))
    FedProx(proximal_mu=0.25, fraction_evaluate=0.0).start(grid, first_model(), 2)
    assert {config["proximal-mu"] for config in heard if config} == {0.25}
    said = [
        line for line in lines if "3 of 3 replies do not confirm the client rule 'prox'" in line
    ]
    assert len(said) == 1


@pytest.mark.parametrize("mu", [0.25, 0.0])
def test_fedprox_with_a_client_that_knows_it_is_quiet(mu: float, lines: list[str]) -> None:
    task = least_squares(clients=3)
    app = ClientApp()
    app.train()(planned(task))
    FedProx(mu=mu, fraction_evaluate=0.0).start(FakeGrid(app, 3), initial_arrays(task), 1)
    FedProx(mu=0.0, fraction_evaluate=0.0).start(FakeGrid(plain_app(), 3), first_model(), 1)
    assert not [line for line in lines if "confirm" in line]


def overshoots(message: Message, answer: Answer) -> Message | None:
    """Clients that disagree in the first round and agree in the second."""
    reply = answer()
    config: Any = message.content.config_records["config"]
    sent = message.content.array_records["arrays"]["w"].numpy()
    client = int(reply.content.metric_records["metrics"]["train_loss"])  # type: ignore[arg-type]
    own = np.eye(DIM)[client] - 0.1 if config["server-round"] == 1 else 1.0
    reply.content.array_records["arrays"]["w"] = Array((sent + own).astype(np.float32))
    return reply


@pytest.mark.parametrize(("max_step", "expected"), [(float("inf"), 1), (2.0, 0)])
def test_a_step_that_went_too_far_is_logged_with_what_to_retune(
    max_step: float, expected: int, lines: list[str]
) -> None:
    grid = FakeGrid(plain_app(), 5, faults=dict.fromkeys(range(5), only(overshoots)))
    strategy = FedExP(eps=0.0, max_step=max_step, weighting="uniform", fraction_evaluate=0.0)
    strategy.start(grid, first_model(), 3)
    said = [line for line in lines if "set max_step=2 or raise eps" in line]
    assert len(said) == expected
