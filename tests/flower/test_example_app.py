"""The app to copy trains as the command line does, on a grid in this process."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

import fedexp as fx
from fedexp.algorithms import ALGORITHMS
from fedexp.errors import UsageError
from fedexp.modes import paper_setup
from fedexp.runs import load_run
from tests.flower.helpers.fake_grid import FakeGrid

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_app"
sys.path.append(str(EXAMPLE))

import run_local  # noqa: E402
from fedexp_app import client_app, server_app  # noqa: E402

NODES, ROUNDS = 3, 3
DEFAULTS = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def run_app(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The rows of a run of the app with three nodes."""
    small = {"clients": NODES, "rounds": ROUNDS, "min-nodes": NODES, "checkpoint": str(folder)}
    config = {**DEFAULTS, **small, **changes}
    nodes = [{"partition-id": k, "fedexp-state": f"{folder}-state"} for k in range(NODES)]
    grid = FakeGrid(client_app.app, nodes, run_config=config)
    server_app.app(grid=grid, context=Context(1, 1, {}, RecordDict(), config))
    return load_run(folder).rows


@pytest.mark.parametrize("algorithm", ["fedavg", "fedexp", "fedprox", "scaffold-exp"])
def test_the_app_trains_as_the_command_line_does(algorithm: str, tmp_path: Path) -> None:
    rows = run_app(tmp_path / "run", algorithm=algorithm)
    task = fx.tasks.digits(clients=NODES)
    setup = paper_setup(task, ALGORITHMS[algorithm]())
    expected = list(fx.simulate(task, setup.algorithm, ROUNDS, NODES, local=setup.local))
    steps = [record.server_lr for record in expected]
    assert [row["server_lr"] for row in rows] == pytest.approx(steps, rel=1e-4)
    losses = [record.train_loss for record in expected]
    assert [row["train_loss"] for row in rows] == pytest.approx(losses, rel=1e-4)


def test_options_change_the_run(tmp_path: Path) -> None:
    usual = run_app(tmp_path / "usual")
    changed = run_app(tmp_path / "changed", eps=10.0, lr=0.1, set="local.steps=2")
    assert max(row["server_lr"] for row in changed) == 1.0
    assert max(row["server_lr"] for row in usual) > 1.0
    assert changed[-1]["train_loss"] > usual[-1]["train_loss"]


def test_secure_sums_give_the_same_step_size(tmp_path: Path) -> None:
    plain, secure = run_app(tmp_path / "plain"), run_app(tmp_path / "secure", secure=True)
    steps = [row["server_lr"] for row in plain]
    assert [row["server_lr"] for row in secure] == pytest.approx(steps, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"algorithm": "fedexq"}, "fedexp"),
        ({"task": "digit"}, "digits"),
        ({"task": "synthetic"}, "digits"),
        ({"set": "epsilon=1"}, "eps"),
    ],
)
def test_a_mistake_in_the_configuration_names_the_nearest_option(
    changes: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=pattern):
        run_app(tmp_path / "run", **changes)


@pytest.mark.parametrize(
    ("node", "pattern"),
    [({}, "start it with --node-config"), ({"partition-id": 7}, "the clients 0 to 2")],
)
def test_a_node_without_its_part_of_the_data_raises(node: dict[str, Any], pattern: str) -> None:
    context = Context(1, 1, node, RecordDict(), {**DEFAULTS, "clients": NODES})
    with pytest.raises(UsageError, match=pattern):
        client_app.train(Message(RecordDict(), 1, "train"), context)


def test_the_script_draws_the_runs_and_knows_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = run_local.parser().parse_args(["--rounds", str(ROUNDS)])
    folders = []
    for name in args.algorithms.split(","):
        folders.append(tmp_path / name)
        config = run_local.run_config(args, name, folders[-1])
        assert config.keys() <= DEFAULTS.keys()
        run_app(folders[-1], **config)
    task = fx.tasks.digits(clients=NODES)
    run_local.show(task, NODES, folders, tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000
    assert {"fedavg", "fedexp"} <= set(capsys.readouterr().out.split())
