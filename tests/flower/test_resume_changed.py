"""Runs that resume otherwise than they began: with more rounds, and with what errors ask for."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

import fedexp as fx
from fedexp.cli.main import main
from fedexp.clipping import MEDIAN
from fedexp.errors import DivergedError, UsageError
from fedexp.flower import FedAdam, FedAvg, FedExP, RuleStrategy, ScaffoldExP, initial_arrays
from fedexp.flower.layout import ndarrays
from fedexp.flower.nodes import TooFewNodesError
from fedexp.flower.server import NoRepliesError
from fedexp.privacy import CentralPrivacy, LocalPrivacy
from fedexp.runs import load_run
from fedexp.runs.folder import MODEL, RESULT, RunFolder
from tests.flower.helpers import private
from tests.flower.helpers.fake_grid import (
    FakeGrid,
    Killed,
    dies_on,
    only,
    raises,
    replies,
    silent,
    with_array,
)
from tests.flower.helpers.plain_app import DIM, first_model, plain_app, record, target
from tests.flower.helpers.user_app import simulated_app
from tests.helpers.problems import least_squares

TASK = least_squares(clients=4, dim=8)
BAD = 1  # the position of the node that misbehaves
CENTRAL: dict[str, Any] = {"clip": 1.0, "delta": 1e-5, "noise_multiplier": 2.0}


def scaffold(folder: Path, rounds: int, faults: Any = None) -> Result:
    """Two of four clients per round: client state, and cohorts that depend on the round."""
    strategy = ScaffoldExP(0.5, 0.5, min_available_nodes=4, checkpoint=folder)
    grid = FakeGrid(simulated_app(TASK), 4, seed=rounds, faults=faults)
    return strategy.start(grid, initial_arrays(TASK), rounds)


def plain(make: Any, folder: Path, rounds: int, faults: Any = None) -> Result:
    grid = FakeGrid(plain_app(), 3, faults=faults)
    return make(checkpoint=folder).start(grid, first_model(), rounds)


class Decaying(FedExP):
    """Its rate changes from round to round in the config."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["lr"] = float(config.get("lr", 1.0)) * 0.5  # type: ignore[arg-type]
        return super().configure_train(server_round, arrays, config, grid)


RUNS = [
    scaffold,
    partial(plain, FedExP),
    partial(plain, partial(FedExP, bound=2.0)),
    partial(plain, FedAdam),
    partial(plain, Decaying),
]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = load_run(folder).rows
    for row in rows:
        row.pop("seconds")
        row["trained"].pop("seconds")
        row.pop("changed", None)
        row["largest_share"].pop(1)  # ids of nodes are new in every federation
    return rows


def assert_same_runs(one: Path, other: Path) -> None:
    assert rows_of(one) == rows_of(other)
    assert (one / MODEL).read_bytes() == (other / MODEL).read_bytes()


@pytest.mark.parametrize("start", RUNS)
def test_a_finished_run_that_is_extended_is_one_long_run_to_the_bit(
    start: Any, tmp_path: Path
) -> None:
    whole = start(tmp_path / "whole", 5)
    for rounds in (2, 3, 5):
        result = start(tmp_path / "run", rounds)
        assert load_run(tmp_path / "run").result["rounds"] == rounds  # type: ignore[index]
    assert_same_runs(tmp_path / "run", tmp_path / "whole")
    for name, value in ndarrays(whole.arrays).items():
        np.testing.assert_array_equal(ndarrays(result.arrays)[name], value)
    assert result.train_metrics_clientapp.keys() == whole.train_metrics_clientapp.keys()
    stored = load_run(tmp_path / "run")
    assert stored.spec["rounds"] == 5
    changed = [(entry["round"], entry["changed"]) for entry in stored.environment["resumed"]]
    assert changed == [(2, {"rounds": [2, 3]}), (3, {"rounds": [3, 5]})]


def test_an_extended_run_that_is_killed_resumes_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise Killed

    scaffold(tmp_path / "whole", 5)
    folder = tmp_path / "run"
    scaffold(folder, 2)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "note_resumed", killed)  # its result is removed by then
        with pytest.raises(Killed):
            scaffold(folder, 5)
    assert not (folder / RESULT).exists()
    assert not (folder / MODEL).exists()  # it is of two rounds
    with pytest.raises(Killed):
        scaffold(folder, 5, dict.fromkeys(range(4), dies_on("train", 4)))
    scaffold(folder, 5)
    assert_same_runs(folder, tmp_path / "whole")


def test_an_extension_that_never_began_can_be_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = partial(plain, FedExP)
    start(tmp_path / "whole", 2)
    start(tmp_path / "run", 2)
    with pytest.raises(Killed):
        start(tmp_path / "run", 5, dict.fromkeys(range(3), dies_on("train", 3)))
    start(tmp_path / "run", 2)
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


def test_a_run_is_not_made_shorter_than_it_is(tmp_path: Path) -> None:
    start = partial(plain, FedExP)
    start(tmp_path / "run", 3)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UsageError, match="has 3 rounds already; set num_rounds to 3 or more"):
        start(tmp_path / "run", 2)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_the_command_line_names_how_to_extend_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain(FedExP, tmp_path / "run", 2)
    assert main(["resume", str(tmp_path / "run"), "--rounds", "3"]) == 2
    assert "start its app again, with more num_rounds" in capsys.readouterr().err


LONG = only(replies(with_array("w", np.full(DIM, 1e4, np.float32))), rounds=[2, 3])
OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # the option, what it was, what it is, and what the rounds after show
    ("max_norm", {}, {"max_norm": 3}, {"dropped": 1}),
    ("max_norm", {"max_norm": 3}, {}, {"dropped": 0}),
    ("bound", {}, {"bound": 3.0}, {"clipped": 1}),
    ("bound", {"bound": 2.0}, {"bound": 1e9}, {"clipped": 0}),
    ("bound", {"bound": 2.0}, {}, {"clipped": None}),
    ("max_step", {"eps": 0.0}, {"eps": 0.0, "max_step": 1.0}, {"server_lr": 1}),
    ("min_replies", {}, {"min_replies": 4}, {"dropped": 3}),
    ("min_replies", {"min_replies": 4}, {}, {"dropped": 0}),
    ("fraction_train", {}, {"fraction_train": 0.5}, {"clients": 1}),
    ("min_train_nodes", {"fraction_train": 0.1}, {"fraction_train": 0.1, "min_train_nodes": 2},
     {"clients": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "was", "now", "shown"), OPTIONS)
def test_a_run_resumes_with_another_option(
    name: str,
    was: dict[str, Any],
    now: dict[str, Any],
    shown: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def start(options: dict[str, Any], rounds: int = 3) -> Result:
        defaults = {"min_train_nodes": 1, "max_empty_rounds": 9, "fraction_evaluate": 0.0}
        strategy = FedExP(**{**defaults, **options}, checkpoint=tmp_path / "run")
        return strategy.start(FakeGrid(plain_app(), 3, faults={BAD: LONG}), first_model(), rounds)

    start(was, 1)
    with caplog.at_level(logging.INFO, "flwr"):
        result = start(now, 3)
    for round in (2, 3):
        metrics = result.train_metrics_clientapp[round]
        assert {n: metrics.get(n) for n in shown} == shown
    stored = load_run(tmp_path / "run")
    # 1 is the default of min_replies, which a spec leaves out
    defaults = {"fraction_train": 1.0, "min_train_nodes": 1, "max_step": "inf"}
    before, after = was.get(name, defaults.get(name)), now.get(name, defaults.get(name))
    assert stored.spec["options"].get(name) == after
    (resumed,) = stored.environment["resumed"]
    assert resumed["changed"] == {f"options.{name}": [before, after], "rounds": [1, 3]}
    assert [row.get("changed") for row in stored.rows] == [None, resumed["changed"], None]
    one, other = ("none" if value is None else value for value in (after, before))
    assert f"after round 1 with {name} {one} (was {other}), rounds 3 (was 1)" in caplog.text
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 0
    assert start(now).train_metrics_clientapp == result.train_metrics_clientapp  # nothing is left


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_bound_that_is_left_out_leaves_nothing_behind(rounds: int, tmp_path: Path) -> None:
    """Where nobody was clipped the run is that without a bound, to the bit."""
    plain(FedExP, tmp_path / "whole", 4)
    plain(partial(FedExP, bound=1e9), tmp_path / "run", rounds)
    strategy = FedExP(checkpoint=tmp_path / "run")
    strategy.start(FakeGrid(plain_app(), 3), first_model(), 4)
    assert (tmp_path / "run" / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()
    assert strategy.run is not None
    assert not any(name.startswith(MEDIAN) for name in strategy.run.state.server)


def test_a_bound_that_is_set_keeps_the_state_of_the_rule(tmp_path: Path) -> None:
    """Its momentum is that of the rounds before."""
    plain(fx_momentum, tmp_path / "whole", 4)
    plain(fx_momentum, tmp_path / "run", 2)
    plain(partial(fx_momentum, bound=1e9), tmp_path / "run", 4)
    assert (tmp_path / "run" / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()


def fx_momentum(**options: Any) -> RuleStrategy:
    return RuleStrategy(algorithm=fx.fedexp_m(), **options)


def test_a_finished_run_takes_no_change_without_more_rounds(
    tmp_path: Path, lines: list[str]
) -> None:
    """Its numbers are those of the options that are stored."""
    first = plain(FedExP, tmp_path / "run", 2)
    again = plain(partial(FedExP, max_norm=3.0), tmp_path / "run", 2)
    assert again.train_metrics_clientapp == first.train_metrics_clientapp
    assert any("max_norm 3.0 (was none) has no effect; raise num_rounds" in line for line in lines)
    stored = load_run(tmp_path / "run")
    assert "max_norm" not in stored.spec["options"]
    assert "resumed" not in stored.environment


def sent_rates(folder: Path, start: float, die: int | None, rounds: int = 6) -> dict[int, Any]:
    """Run `Decaying` from a rate; return the rates that nodes were sent."""
    rates: dict[int, Any] = {}

    def tap(message: Message) -> None:
        config: Any = message.content.config_records.get("config", {})
        if message.metadata.message_type == "train" and "lr" in config:
            rates[config["server-round"]] = config["lr"]

    faults = dict.fromkeys(range(3), dies_on("train", die)) if die else {}
    grid = FakeGrid(plain_app(), 3, faults=faults)
    grid.taps.append(tap)
    strategy = Decaying(fraction_evaluate=0.0, checkpoint=folder)
    with suppress(Killed):
        strategy.start(grid, first_model(), rounds, train_config=ConfigRecord({"lr": start}))
    return rates


def test_a_changed_config_is_sent_also_where_a_subclass_changes_it(tmp_path: Path) -> None:
    """The subclass decays what the user has set now, and resumes as it was after that."""
    assert sent_rates(tmp_path / "run", 1.0, die=3) == {1: 0.5, 2: 0.25, 3: 0.125}
    for _ in range(2):  # killed before a round of the new rate was stored
        assert sent_rates(tmp_path / "run", 0.1, die=3) == {3: 0.05}
    assert sent_rates(tmp_path / "run", 0.1, die=5) == {3: 0.05, 4: 0.025, 5: 0.0125}
    assert sent_rates(tmp_path / "run", 0.1, die=None) == {5: 0.0125, 6: 0.00625}
    stored = load_run(tmp_path / "run")
    assert stored.spec["options"]["train_config.lr"] == 0.1
    changed = [entry.get("changed") for entry in stored.environment["resumed"]]
    assert changed == [{"options.train_config.lr": [1.0, 0.1]}, None, None, None]
    of_rows = {row["round"]: row["changed"] for row in stored.rows if "changed" in row}
    assert of_rows == {3: changed[0]}  # by the third start: two were killed in that round


def test_an_option_that_only_starts_the_state_of_a_rule_cannot_change(tmp_path: Path) -> None:
    """FedHyper's step size is its own state: another lr would have no effect."""

    def start(lr: float) -> Result:
        strategy = RuleStrategy(algorithm=fx.fedhyper(lr), checkpoint=tmp_path / "run")
        return strategy.start(FakeGrid(plain_app(), 3), first_model(), 2)

    start(1.0)
    with pytest.raises(UsageError, match=r"options\.lr is 1\.0, here it is 0\.5"):
        start(0.5)


# --- each remedy that an error names


def rated_app(clip: float = math.inf) -> ClientApp:
    """Clients move by the config's rate; one of them ten thousand times as far."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        w = message.content.array_records["arrays"]["w"].numpy()
        rate: Any = message.content.config_records["config"].get("lr", 0.5)
        gradient = (w - target(client)) * (1e4 if client == BAD else 1.0)
        gradient *= min(1.0, clip / float(np.linalg.norm(gradient)))
        metrics = MetricRecord({"num-examples": 1})
        arrays = record((w - rate * gradient).astype(np.float32), 0.0, 0)
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def lost_where_it_is_long(round: int, arrays: ArrayRecord) -> MetricRecord:
    size = float(np.abs(ndarrays(arrays)["w"]).max())
    return MetricRecord({"loss": size if size < 100 else math.inf})


def start_rated(folder: Path, app: ClientApp, rounds: int, config: Any, **options: Any) -> Result:
    # the first divergence ends the run; after another the long client would be left out
    common = {"min_train_nodes": 3, "max_empty_rounds": 1, "fraction_evaluate": 0.0}
    strategy = FedAvg(**{**common, **options}, checkpoint=folder)
    return strategy.start(
        FakeGrid(app, 3),
        first_model(),
        rounds,
        train_config=ConfigRecord(config),
        evaluate_fn=lost_where_it_is_long,
    )


REMEDIES: list[tuple[str, dict[str, Any]]] = [
    ("lower the local", {"config": {"lr": 1e-4}}),
    ("or server learning rate", {"lr": 1e-3}),
    ("clip gradients in the ClientApp", {"app": rated_app(1.0)}),
    ("or max_norm", {"max_norm": 10.0}),
    ("or set bound", {"bound": 2.0}),
]


@pytest.mark.parametrize("rounds", [2, 6])
@pytest.mark.parametrize(("text", "remedy"), REMEDIES)
def test_a_run_that_diverged_resumes_under_each_remedy_that_its_error_names(
    text: str, remedy: dict[str, Any], rounds: int, tmp_path: Path, lines: list[str]
) -> None:
    folder, app = tmp_path / "run", rated_app()
    for _ in range(2):  # without a remedy it does not end otherwise
        with pytest.raises(DivergedError) as raised:
            start_rated(folder, app, rounds, {})
    assert any(text in line for line in (str(raised.value), *lines))
    assert load_run(folder).result["status"] == "diverged"  # type: ignore[index]
    result = start_rated(folder, **{"app": app, "rounds": rounds, "config": {}, **remedy})
    stored = load_run(folder)
    assert (stored.result["status"], len(stored.rows)) == ("finished", rounds)  # type: ignore[index]
    assert 0 < np.abs(ndarrays(result.arrays)["w"]).max() < 100
    resumed = stored.environment.get("resumed", [{}])  # none where the first round diverged
    assert ("changed" in resumed[-1]) == ("app" not in remedy)


def start_plain(folder: Path, faults: Any = None, timeout: float = 600, **options: Any) -> Result:
    strategy = FedAvg(
        **{"max_empty_rounds": 1, "fraction_evaluate": 0.0, **options}, checkpoint=folder
    )
    return strategy.start(FakeGrid(plain_app(), 3, faults=faults), first_model(), 4, timeout)


ALL = range(3)
ENDS: list[tuple[type[Exception], str, dict[str, Any], dict[str, Any]]] = [
    # the error, its remedy, a start that ends with it, and one that applies the remedy
    (NoRepliesError, "fix the ClientApp",
     {"faults": dict.fromkeys(ALL, only(raises))}, {}),
    (NoRepliesError, "raise the timeout",
     {"faults": dict.fromkeys(ALL, only(silent, rounds=[3])), "timeout": 0.05}, {}),
    (NoRepliesError, "no usable reply", {"max_norm": 0.01}, {"max_norm": 100.0}),
    (NoRepliesError, "no usable reply", {"min_replies": 4}, {"min_replies": 2}),
    (TooFewNodesError, "lower min_available_nodes and min_train_nodes",
     {"min_train_nodes": 4, "min_available_nodes": 4, "wait_for_nodes": 0.0},
     {"min_train_nodes": 2, "min_available_nodes": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "options", "remedy"), ENDS)
def test_a_run_that_ended_early_resumes_under_the_remedy_that_its_error_names(
    error: Any, text: str, options: dict[str, Any], remedy: dict[str, Any], tmp_path: Path
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=text):
            start_plain(tmp_path / "run", **options)
    result = start_plain(tmp_path / "run", **remedy)
    clients = [metrics["clients"] for metrics in result.train_metrics_clientapp.values()]
    assert clients == [3, 3, 3, 3]
    stored = load_run(tmp_path / "run")
    assert stored.result["status"] == "finished"  # type: ignore[index]
    for name, value in remedy.items():
        assert stored.spec["options"].get(name, value) == value


# --- privacy


def start_private(folder: Path, rounds: int = 3, **options: Any) -> Result:
    options = {"min_train_nodes": 1, **options}
    privacy = options.pop("privacy", None) or CentralPrivacy(**CENTRAL, noise_seed=0)
    evaluate = options.pop("evaluate_fn", None)
    strategy = private.strategy(privacy=privacy, checkpoint=folder, **options)
    grid = FakeGrid(private.app(), private.NODES)
    return strategy.start(grid, private.model(), rounds, evaluate_fn=evaluate)


@pytest.mark.filterwarnings("ignore:whoever knows noise_seed")
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"rounds": 4}, "there rounds is 3, here it is 4"),
        ({"fraction_train": 0.5}, r"options\.fraction_train is 1\.0, here it is 0\.5"),
        ({"min_train_nodes": 2}, r"options\.min_train_nodes is 1, here it is 2"),
        ({"privacy": CentralPrivacy(**{**CENTRAL, "clip": 2.0})}, r"options\.privacy\.clip"),
        ({"privacy": CentralPrivacy(**CENTRAL, cohort=9)}, r"options\.privacy\.cohort"),
        ({"privacy": LocalPrivacy(**CENTRAL)}, r"options\.privacy\."),
        ({"bound": 2.0}, r"options\.bound"),
        ({"total_clients": 99}, r"options\.total_clients"),
    ],
)
def test_what_the_accounting_depends_on_cannot_change(
    options: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    start_private(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UsageError, match=pattern):
        start_private(tmp_path / "run", **options)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.filterwarnings("ignore:whoever knows noise_seed")
def test_a_private_run_that_falls_back_under_a_remedy_gets_no_budget_back(tmp_path: Path) -> None:
    """It resumes from an earlier round with another max_step, and pays for that round again."""

    def diverges(round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": math.inf if round == 3 else 1.0})

    def released() -> int:
        releases = json.loads((tmp_path / "run" / "checkpoint-releases.json").read_text())
        return sum(row["count"] for row in releases["releases"])

    whole = start_private(tmp_path / "whole", 5).train_metrics_clientapp
    for spent in (3, 4):
        with pytest.raises(DivergedError):
            start_private(tmp_path / "run", 5, evaluate_fn=diverges)
        assert released() == spent
    resumed = start_private(tmp_path / "run", 5, max_step=2.0)
    assert load_run(tmp_path / "run").environment["resumed"][-1]["round"] == 1  # one further back
    rows = resumed.train_metrics_clientapp
    assert released() == 8
    assert len(rows) == 5
    epsilon: Any = rows[5]["epsilon"]
    assert epsilon > whole[5]["epsilon"]
