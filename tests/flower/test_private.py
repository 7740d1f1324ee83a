"""Privacy through a strategy: clip and noise at a trusted server, or at the clients themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedexp.errors import UsageError
from fedexp.flower import FedAvg, FedExP, RuleStrategy, ScaffoldExP, local_privacy
from fedexp.flower.layout import ndarrays
from fedexp.privacy import CentralPrivacy, LocalPrivacy, epsilon
from tests.flower.fake_grid import FakeGrid, replies
from tests.flower.plain_app import first_model as model_with_buffers
from tests.flower.plain_app import plain_app

DIM, NODES = 400, 30
pytestmark = pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")


def model() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(DIM, np.float32)), "n": Array(np.array(3))})


def update(client: int) -> NDArray[Any]:
    """Of norm 1, with a part that all clients share."""
    own = np.random.default_rng(client).normal(size=DIM)
    own[0] = 0.4 * math.sqrt(DIM)
    return (own / np.linalg.norm(own)).astype(np.float32)


def app(mods: list[Any] | None = None, scale: float = 1.0) -> ClientApp:
    """Each client moves by its own vector, whatever it is sent."""
    made = ClientApp(mods=mods)

    @made.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        moved = message.content.array_records["arrays"]["w"].numpy() - scale * update(client)
        arrays = ArrayRecord({"w": Array(moved), "n": Array(np.array(99))})
        metrics = MetricRecord({"num-examples": 10 * client + 1, "train_loss": float(client)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return made


def metrics_of(strategy: RuleStrategy, grid: FakeGrid, rounds: int = 1) -> list[Any]:
    result = strategy.start(grid, model(), rounds)
    return [result.train_metrics_clientapp[k] for k in range(1, rounds + 1)]


def central(z: float, **options: Any) -> CentralPrivacy:
    return CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=z, noise_seed=0, **options)


def strategy(rule: Callable[..., RuleStrategy] = FedExP, **options: Any) -> RuleStrategy:
    return rule(fraction_evaluate=0.0, **options)


def test_with_hardly_any_noise_it_is_the_plain_strategy() -> None:
    plain = metrics_of(strategy(weighting="uniform"), FakeGrid(app(), NODES), 2)
    private = metrics_of(strategy(privacy=central(1e-6)), FakeGrid(app(), NODES), 2)
    for one, other in zip(plain, private, strict=True):
        assert one["server_lr"] > 2
        assert other["server_lr"] == pytest.approx(one["server_lr"], rel=1e-3)


def test_metrics_tell_the_cost_and_nothing_exact_of_a_client() -> None:
    rows = metrics_of(strategy(privacy=central(2.0)), FakeGrid(app(), NODES), 3)
    assert [row["epsilon"] for row in rows] == [epsilon(2.0, k, 1e-5) for k in (1, 2, 3)]
    assert all(row["delta"] == 1e-5 and 0 < row["noise_share"] <= 1 for row in rows)
    assert all("train_loss" not in row for row in rows)
    plain = metrics_of(strategy(), FakeGrid(app(), NODES))
    assert "train_loss" in plain[0]


def test_a_client_that_shouts_is_heard_like_the_others() -> None:
    def shout(content: RecordDict) -> None:
        loud = -1e6 * update(0)
        content["arrays"] = ArrayRecord({"w": Array(loud), "n": Array(np.array(3))})

    grid = FakeGrid(app(), NODES, faults={0: replies(shout)})
    quiet = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1e-6, noise_seed=0)
    moved = ndarrays(strategy(FedAvg, privacy=quiet).start(grid, model(), 1).arrays)["w"]
    honest = -np.mean([update(k) for k in range(NODES)], axis=0)
    np.testing.assert_allclose(moved, honest, atol=1e-6)


def test_who_does_not_answer_does_not_shrink_the_denominator() -> None:
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


def test_a_run_that_died_is_charged_for_what_it_may_have_shown(tmp_path: Path) -> None:
    """Round 2 was released and lost: the resumed run makes it again, with other noise, and pays."""
    asked = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0)
    seen: list[NDArray[Any]] = []

    def look(round: int, arrays: ArrayRecord) -> MetricRecord:
        if round == 2:
            seen.append(ndarrays(arrays)["w"].copy())
            if len(seen) == 1:
                raise KeyboardInterrupt
        return MetricRecord({"round": round})

    def run() -> Any:
        private = strategy(FedAvg, privacy=asked, checkpoint=tmp_path / "run")
        return private.start(FakeGrid(app(), NODES), model(), 3, evaluate_fn=look)

    with pytest.raises(KeyboardInterrupt):
        run()
    spent = run().train_metrics_clientapp
    assert spent[1]["epsilon"] == pytest.approx(epsilon(2.0, 1, 1e-5))
    assert spent[3]["epsilon"] == pytest.approx(epsilon(2.0, 4, 1e-5))
    assert not np.array_equal(seen[0], seen[1])


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


def test_clients_answer_no_server_that_reckons_with_other_noise() -> None:
    grid = FakeGrid(app([local_privacy(local())]), 3)
    row = metrics_of(strategy(privacy=local(noise_multiplier=0.1)), grid)[0]
    assert (row["clients"], row["dropped"]) == (0, 3)


def test_clients_stop_when_their_budget_is_spent() -> None:
    grid = FakeGrid(app([local_privacy(local(rounds=2))]), 3)
    rows = metrics_of(strategy(privacy=local()), grid, 3)
    assert [row["clients"] for row in rows] == [3, 3, 0]


def test_an_update_that_is_not_finite_says_nothing() -> None:
    grid = FakeGrid(app([local_privacy(local())], scale=math.nan), 3)
    arrived = caught(grid)
    row = metrics_of(strategy(privacy=local()), grid)[0]
    assert row["clients"] == 3
    assert all(np.isfinite(ndarrays(m.content.array_records["arrays"])["w"]).all() for m in arrived)


def test_a_model_with_batchnorm_is_refused_at_the_client() -> None:
    plain = plain_app()
    private = ClientApp(mods=[local_privacy(local())])
    private.train()(lambda message, context: plain(message, context))
    grid = FakeGrid(private, 3)
    arrived = caught(grid)
    FedExP(fraction_evaluate=0.0).start(grid, model_with_buffers(), 1)
    assert all("running_mean would leave" in str(message.error.reason) for message in arrived)
    assert len(arrived) == 3
