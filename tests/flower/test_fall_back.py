"""Runs whose clients cannot train from the model any more: they fall back to an earlier state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from torch import nn

from fedexp.clipping import split_medians
from fedexp.engine import SimulationState
from fedexp.flower import (
    FedAvg,
    LocalRule,
    RuleStrategy,
    Scaffold,
    ScaffoldExP,
    report_client_id,
)
from fedexp.flower.layout import ndarrays
from fedexp.flower.request import EXTRAS
from fedexp.flower.server import FederatedRun, NoRepliesError
from fedexp.privacy import CentralPrivacy
from fedexp.runs import load_run
from fedexp.storage import from_bytes
from tests.flower.helpers import private
from tests.flower.helpers.fake_grid import (
    Answer,
    FakeGrid,
    Fault,
    Killed,
    dies_on,
    healthy,
    only,
    raises,
    replies,
    silent,
    with_array,
)
from tests.flower.helpers.plain_app import DIM, first_model, plain_app, target

NODES = 6
BAD = 1  # the position of the attacker
LOST = replies(with_array("w", np.full(DIM, np.nan, np.float32)))
MISFIT = replies(with_array("w", np.zeros(DIM + 1, np.float32)))


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM))


def quartic_app() -> ClientApp:
    """Each client takes 10 steps on ||w - t||² / 2 + ||w - t||⁴ / 4, which overflow far away."""
    app = ClientApp()
    report_client_id(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = Point()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
        local = LocalRule(message, context, model, optimizer)
        goal = 0.5 * torch.from_numpy(target(int(str(context.node_config["partition-id"]))))
        for _ in range(10):
            optimizer.zero_grad()
            distance = (model.w - goal).square().sum()
            (distance / 2 + distance.square() / 4).backward()
            optimizer.step()
        return local.reply({"num-examples": 1})

    return app


def with_control(factor: float) -> Callable[[RecordDict], None]:
    """Return a change of a reply: the change of its control variate times a factor."""

    def change(content: RecordDict) -> None:
        extras = content.array_records[EXTRAS]
        extras["control"] = Array(extras["control"].numpy() * np.float32(factor))

    return change


def attack(rounds: Iterable[int] | None) -> dict[int, Fault]:
    return {BAD: only(replies(with_control(1e3)), rounds=rounds)}


def train(
    faults: Mapping[int, Fault],
    rounds: int,
    make: Any = Scaffold,
    nodes: Iterable[int] = range(NODES),
    **options: Any,
) -> tuple[Result, FederatedRun, FakeGrid]:
    grid = FakeGrid(quartic_app(), [{"partition-id": k} for k in nodes], faults=faults)
    strategy = make(fraction_evaluate=0.0, weighting="uniform", **options)
    result = strategy.start(grid, ArrayRecord(Point().state_dict()), rounds)
    assert strategy.run is not None
    return result, strategy.run, grid


def weights(result: Result) -> NDArray[Any]:
    return ndarrays(result.arrays)["w"]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = load_run(folder).rows
    for row in rows:
        row.pop("seconds")
        row["trained"].pop("seconds")
    return rows


def client_controls(run: FederatedRun, folder: Path) -> torch.Tensor:
    """Return the accepted control variates of all clients, [N, d]."""
    files = [folder / run.study / c / f"{r}.safetensors" for c, r in sorted(run.accepted.items())]
    cpu = torch.device("cpu")
    return torch.stack([from_bytes(path.read_bytes(), cpu)["control"] for path in files])


@pytest.mark.parametrize("make", [Scaffold, ScaffoldExP])
def test_a_poisoned_control_variate_is_undone_and_its_node_named(
    make: Any, tmp_path: Path, lines: list[str], state_folder: Path
) -> None:
    """The run then converges as without the attack, which costs four rounds of 30."""
    honest, _, _ = train({}, 30, make)
    lines.clear()
    attacked, run, grid = train(attack([2]), 30, make, checkpoint=tmp_path / "run")
    assert np.linalg.norm(weights(honest)) > 0.5
    np.testing.assert_allclose(weights(attacked), weights(honest), atol=3e-3)
    rows = rows_of(tmp_path / "run")
    clients = [row["clients"] for row in rows]
    assert clients == [6, 6, 0, 0, 0, 5, *([6] * 24)]
    node = grid.nodes[BAD].node_id
    assert [(row["round"], row["back_to"], row["undone"]) for row in rows if "back_to" in row] == [
        (5, 1, [node])
    ]
    (line,) = [line for line in lines if "is undone" in line]
    assert "back to round 1" in line
    assert f"node {node}, with the largest share of the control sums" in line
    # the server's control variate is the mean of the clients'
    assert len(run.accepted) == NODES
    mean = client_controls(run, state_folder).mean(dim=0)
    torch.testing.assert_close(run.state.broadcast["control"], mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("round", [3, 5, 6, 7])
def test_a_run_that_falls_back_and_is_killed_resumes_to_the_same_numbers(
    round: int, tmp_path: Path
) -> None:
    whole, _, _ = train(attack([2]), 10, checkpoint=tmp_path / "whole")
    faults = {**attack([2]), 0: dies_on("train", round)}
    with pytest.raises(Killed):
        train(faults, 10, checkpoint=tmp_path / "run")
    assert len(rows_of(tmp_path / "run")) == round - 1
    resumed, _, _ = train(attack([2]), 10, checkpoint=tmp_path / "run")
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    np.testing.assert_array_equal(weights(resumed), weights(whole))


def test_a_run_that_falls_back_takes_a_bound_that_was_set_since(tmp_path: Path) -> None:
    """Its earlier states have no medians."""
    with pytest.raises(Killed):
        train({**attack([2]), 0: dies_on("train", 4)}, 30, checkpoint=tmp_path / "run")
    bounded, run, _ = train({}, 30, checkpoint=tmp_path / "run", bound=100.0)
    metrics: Any = bounded.train_metrics_clientapp
    assert [row["clients"] for row in metrics.values()] == [6, 6, 0, 0, 0, 5, *([6] * 24)]
    assert cast(float, metrics[30]["median_norm"]) > 0
    assert all(value > 0 for value in split_medians(run.state.server)[1].values())
    honest, _, _ = train({}, 30)
    np.testing.assert_allclose(weights(bounded), weights(honest), atol=3e-3)


def test_an_attacker_in_every_round_is_left_out_ever_longer(tmp_path: Path) -> None:
    """In the end the model is that of the others, or between it and that of all."""
    others, _, _ = train({}, 30, nodes=[0, 2, 3, 4, 5])
    everyone, _, _ = train({}, 30)
    attacked, _, _ = train(attack(None), 40, checkpoint=tmp_path / "run")
    between = np.linalg.norm(weights(everyone) - weights(others))
    assert np.linalg.norm(weights(attacked) - weights(others)) < between
    rows = rows_of(tmp_path / "run")
    back = [row["round"] for row in rows if "back_to" in row]
    gaps = [later - earlier for earlier, later in pairwise(back)]
    assert gaps == [1 + 1 + 3, 2 + 1 + 3, 4 + 1 + 3, 8 + 1 + 3]


# --- a plain app, whose clients move half way to a target: when to fall back, and when not


def start(made: RuleStrategy, rounds: int, faults: Mapping[int, Fault] | None = None) -> Result:
    return made.start(FakeGrid(plain_app(), NODES, faults=faults), first_model(), rounds, 0.05)


def averaging(**options: Any) -> RuleStrategy:
    return FedAvg(fraction_evaluate=0.0, weighting="uniform", **options)


def state_of(made: RuleStrategy) -> SimulationState:
    assert made.run is not None
    return made.run.state


def by_round(first: int, *faults: Fault) -> Fault:
    """One fault per round, from the first of them on; the last one stays."""

    def fault(message: Message, answer: Answer) -> Message | None:
        config = message.content.config_records.get("config", ConfigRecord())
        since = int(str(config.get("server-round", 0))) - first
        return (faults[min(since, len(faults) - 1)] if since >= 0 else healthy)(message, answer)

    return fault


ENDS: dict[str, list[Fault]] = {  # by node, from round 6 on
    "errors": [raises] * 6,
    "no answers": [silent] * 6,
    "another model": [MISFIT] * 6,
    "garbage of a minority": [LOST, LOST, raises, raises, raises, raises],
    "garbage of half": [LOST, LOST, LOST, silent, silent, silent],
}


@pytest.mark.parametrize("faults", ENDS.values(), ids=ENDS)
def test_errors_and_minorities_end_the_run_and_undo_nothing(
    faults: list[Fault], tmp_path: Path
) -> None:
    honest = averaging()
    start(honest, 5)
    made = averaging(checkpoint=tmp_path / "run")
    with pytest.raises(NoRepliesError, match="no usable reply in 3 rounds in a row"):
        start(made, 20, {k: by_round(6, fault) for k, fault in enumerate(faults)})
    assert (state_of(made).steps, state_of(made).round) == (5, 7)
    assert torch.equal(state_of(made).params, state_of(honest).params)
    assert not any("back_to" in row for row in rows_of(tmp_path / "run"))


def test_one_round_of_errors_among_them_ends_the_run(tmp_path: Path) -> None:
    made = averaging(checkpoint=tmp_path / "run")
    with pytest.raises(NoRepliesError):
        start(made, 20, dict.fromkeys(range(NODES), by_round(6, LOST, raises, LOST)))
    assert len(rows_of(tmp_path / "run")) == 7


def test_garbage_beside_a_usable_reply_undoes_nothing(tmp_path: Path) -> None:
    made = averaging(checkpoint=tmp_path / "run")
    start(made, 20, dict.fromkeys(range(1, NODES), by_round(6, LOST)))
    assert state_of(made).steps == 20
    few = averaging(checkpoint=tmp_path / "few", min_replies=3)
    with pytest.raises(NoRepliesError):
        start(few, 20, dict.fromkeys(range(2, NODES), by_round(6, LOST)))
    assert state_of(few).steps == 5
    assert not any("back_to" in row for row in rows_of(tmp_path / "few"))


def test_where_no_state_is_better_nothing_is_undone(tmp_path: Path, lines: list[str]) -> None:
    """All reply with garbage from round 6 on, for a reason that is not the model's."""
    faults = dict.fromkeys(range(NODES), by_round(6, LOST))
    for _ in range(2):
        with pytest.raises(NoRepliesError):
            start(averaging(checkpoint=tmp_path / "run"), 40, faults)
        rows = rows_of(tmp_path / "run")
        # those before steps 5, 4 and 1; then the newest again
        back = [(row["round"], row["back_to"]) for row in rows if "back_to" in row]
        assert back == [(8, 4), (11, 3), (14, 0), (17, 7)]
        assert len(rows) == 19
    assert sum("is undone" in line for line in lines) == 4
    made, honest = averaging(checkpoint=tmp_path / "run"), averaging()
    start(made, 25)
    start(honest, 11)
    assert state_of(made).steps == 11
    assert torch.equal(state_of(made).params, state_of(honest).params)


@pytest.mark.parametrize("round", [9, 13, 17, 18])
def test_a_search_that_is_killed_resumes_to_the_same_rounds(round: int, tmp_path: Path) -> None:
    lost = dict.fromkeys(range(NODES), by_round(6, LOST))
    killed = dict.fromkeys(lost, by_round(6, *[LOST] * (round - 6), dies_on("train", round)))
    with pytest.raises(NoRepliesError):
        start(averaging(checkpoint=tmp_path / "whole"), 40, lost)
    with pytest.raises(Killed):
        start(averaging(checkpoint=tmp_path / "run"), 40, killed)
    with pytest.raises(NoRepliesError):
        start(averaging(checkpoint=tmp_path / "run"), 40, lost)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def lost_beyond(limit: float) -> Fault:
    """Garbage wherever the first number of the model that was sent is beyond a limit."""

    def fault(message: Message, answer: Answer) -> Message | None:
        sent = message.content.array_records["arrays"]["w"].numpy()
        return (LOST if abs(sent[0]) > limit else healthy)(message, answer)

    return fault


def test_states_that_lead_to_the_same_end_are_left_behind(tmp_path: Path) -> None:
    """The model is lost after step 7 whatever the clients do: no run in circles."""
    honest = averaging()
    start(honest, 7)
    limit = abs(state_of(honest).params[0].item()) * 0.9999
    folder = tmp_path / "run"
    faults = dict.fromkeys(range(NODES), lost_beyond(limit))
    with pytest.raises(NoRepliesError):
        start(averaging(checkpoint=folder), 100, faults)
    rows = rows_of(folder)
    steps = [sum(row["clients"] > 0 for row in rows[:n]) for n in range(len(rows) + 1)]
    back = [row["back_to"] for row in rows if "back_to" in row]
    assert steps[back[0]] == 6
    assert steps[back[1]] == 4
    assert back[2] == 0
    assert len(rows) < 50


def test_a_state_of_several_steps_ago_is_found_by_who_decided_a_step(tmp_path: Path) -> None:
    """What was poisoned in round 3 makes replies unusable four rounds later."""
    made = averaging(checkpoint=tmp_path / "run")

    def lost_when_spoilt(message: Message, answer: Answer) -> Message | None:
        sent = message.content.array_records["arrays"]["w"].numpy()
        round: Any = message.content.config_records["config"]["server-round"]
        return (LOST if sent.max() > 10 and round >= 7 else healthy)(message, answer)

    spoilt = replies(with_array("w", np.full(DIM, 1e4, np.float32)))
    faults: dict[int, Fault] = dict.fromkeys(range(NODES), lost_when_spoilt)
    faults[BAD] = by_round(3, spoilt, lost_when_spoilt)  # healthy before
    result = start(made, 16, faults)
    (row,) = [row for row in rows_of(tmp_path / "run") if "back_to" in row]
    assert (row["round"], row["back_to"]) == (9, 0)
    node = FakeGrid(plain_app(), NODES).nodes[BAD].node_id
    assert set(row["undone"]) == {node}
    clients = [metrics["clients"] for metrics in result.train_metrics_clientapp.values()]
    assert clients == [6, 6, 6, 6, 6, 6, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5]
    assert np.abs(weights(result)).max() < 3


def long_and_heavy(content: RecordDict) -> None:
    content.array_records["arrays"]["w"] = Array(np.full(DIM, 9e8, np.float32))
    content.metric_records["metrics"]["num-examples"] = 1e20


def test_steps_that_were_not_taken_decide_nothing(tmp_path: Path) -> None:
    """One node has all of rounds 8 (too few replies) and 9 (a step that is undone)."""
    later = [LOST, LOST, LOST, healthy]
    faults = dict.fromkeys(range(NODES), by_round(8, raises, healthy, healthy, *later))
    faults[BAD] = by_round(8, healthy, replies(long_and_heavy), healthy, *later)

    def run(folder: Path, faults: Mapping[int, Fault]) -> list[dict[str, Any]]:
        made = FedAvg(lr=3.0, fraction_evaluate=0.0, min_replies=2, checkpoint=folder)
        start(made, 16, faults)
        return rows_of(folder)

    rows = run(tmp_path / "whole", faults)
    assert [row["clients"] for row in rows] == [6] * 7 + [0, 0, 5, 0, 0, 0, 6, 6, 6]
    back = [(row["round"], row["back_to"]) for row in rows if "back_to" in row]
    assert back == [(13, 9)]  # before round 10, and not before round 9
    with pytest.raises(Killed):
        run(tmp_path / "run", {**faults, 0: by_round(8, raises, healthy, dies_on("train", 10))})
    assert run(tmp_path / "run", faults) == rows


def test_an_evaluation_that_undoes_steps_leaves_no_state_of_them(tmp_path: Path) -> None:
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": np.inf if round == 6 else 1.0})

    faults = dict.fromkeys(range(NODES), by_round(7, LOST, LOST, LOST, healthy))
    made = averaging(evaluate_every=3, checkpoint=tmp_path / "run")
    made.start(FakeGrid(plain_app(), NODES, faults=faults), first_model(), 12, evaluate_fn=evaluate)
    back = [(row["round"], row["back_to"]) for row in rows_of(tmp_path / "run") if "back_to" in row]
    assert back == [(6, 3), (9, 0)]


def test_earlier_states_are_few_and_from_5_to_16_steps_ago(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        assert made.run is not None
        seen.append([state.steps for state in made.run.earlier])

    made = averaging(checkpoint=tmp_path / "run")
    grid = FakeGrid(plain_app(), 2)
    made.start(grid, first_model(), 40, evaluate_fn=evaluate)
    assert seen[1:4] == [[0], [0, 1], [0, 2]]
    assert (seen[17], seen[20], seen[21]) == ([12, 15, 16], [12, 16, 19], [16, 19, 20])
    for steps, held in enumerate(seen[17:], 17):
        assert held[-1] == steps - 1
        assert 5 <= steps - held[0] <= 16
        assert len(held) == 3
    left = {path.name for path in (tmp_path / "run").glob("checkpoint*")}
    assert left == {"checkpoint.json", "checkpoint-40.safetensors"}  # the run is over


def test_a_private_run_does_not_fall_back_and_gets_no_budget_back(tmp_path: Path) -> None:
    """What clients reply must not decide which model is released."""
    privacy = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0)
    lost = replies(with_array("w", np.full(private.DIM, np.nan, np.float32)))
    faults = dict.fromkeys(range(private.NODES), by_round(4, lost))
    for spent in (5, 5):
        made = private.strategy(privacy=privacy, checkpoint=tmp_path / "run")
        grid = FakeGrid(private.app(), private.NODES, faults=faults)
        with pytest.raises(NoRepliesError):
            made.start(grid, private.model(), 12)
        assert made.run is not None
        assert made.run.earlier == ()
        assert sum(made.run.ledger.releases.values()) == spent
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 5
    assert not any({"back_to", "largest_share"} & row.keys() for row in rows)


def test_the_node_of_a_large_id_is_remembered(tmp_path: Path) -> None:
    """Flower draws ids up to 2⁶⁴."""
    for last in (False, True):
        attacker = only(replies(long_and_heavy), rounds=[2])
        grid = FakeGrid(plain_app(), NODES, faults={BAD: attacker})
        grid.nodes[BAD].node_id = 2**64 - 1
        if not last:
            grid.nodes[0].fault = dies_on("train", 3)
        made = FedAvg(lr=3.0, fraction_evaluate=0.0, checkpoint=tmp_path / "run")
        with nullcontext() if last else pytest.raises(Killed):
            made.start(grid, first_model(), 4)
    rows = rows_of(tmp_path / "run")
    assert [row.get("undone") for row in rows] == [None, [2**64 - 1], None, None]
    assert [row["clients"] for row in rows] == [6, 0, 5, 6]  # it is left out by the second process


def test_an_evaluation_that_undoes_several_steps_leaves_control_variates_consistent(
    state_folder: Path,
) -> None:
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": np.inf if round == 6 else 1.0})

    grid = FakeGrid(quartic_app(), NODES)
    made = Scaffold(fraction_evaluate=0.0, weighting="uniform", evaluate_every=3)
    made.start(grid, ArrayRecord(Point().state_dict()), 9, evaluate_fn=evaluate)
    run = made.run
    assert run is not None
    mean = client_controls(run, state_folder).mean(dim=0)
    torch.testing.assert_close(run.state.broadcast["control"], mean, atol=1e-5, rtol=1e-5)


def answers(faults: Mapping[int, Fault]) -> Fault:
    """Return a fault that depends on the round; healthy in others."""

    def fault(message: Message, answer: Answer) -> Message | None:
        config = message.content.config_records.get("config", ConfigRecord())
        return faults.get(int(str(config.get("server-round", 0))), healthy)(message, answer)

    return fault


def pulled(length: float) -> Fault:
    return replies(with_array("w", np.full(DIM, length, np.float32)))


def plain_run(faults: Mapping[int, Fault], rounds: int) -> tuple[FederatedRun, list[Any]]:
    """Run FedAvg of an app whose clients pull to a target; return the run and its metrics."""
    strategy = FedAvg(fraction_evaluate=0.0, weighting="uniform")
    result = strategy.start(FakeGrid(plain_app(), NODES, faults=faults), first_model(), rounds)
    assert strategy.run is not None
    return strategy.run, [result.train_metrics_clientapp[k] for k in range(1, rounds + 1)]


def test_a_second_attack_does_not_bring_back_what_the_first_one_spoiled() -> None:
    """What followed an undone step is discarded, so that no later fallback can choose it."""
    lost = dict.fromkeys((19, 20, 21, 23, 24, 25), LOST)
    faults = {k: answers(lost) for k in range(NODES)}
    faults[1] = answers({**lost, 13: pulled(1e6)})
    faults[2] = answers({**lost, 22: pulled(-3e7)})
    run, _ = plain_run(faults, 30)
    honest, _ = plain_run({}, 30)
    assert run.setbacks["fallbacks"] == 0
    assert all(state.params.norm() < 10 for state in run.earlier)
    assert torch.linalg.vector_norm(run.state.params - honest.state.params) < 0.5


def test_no_node_is_left_out_where_none_decided_a_step(lines: list[str]) -> None:
    lost = dict.fromkeys((21, 22, 23, 25, 26, 27), LOST)
    _, rows = plain_run({k: answers(lost) for k in range(NODES)}, 30)
    assert [row["clients"] for row in rows[27:]] == [NODES] * 3
    assert sum("back to round" in line for line in lines) == 2
    assert not any("is left out for a while" in line for line in lines)
