"""The app to copy: it trains as the simulator does, may be published, and uses public names."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict

import fedexp as fx
from fedexp.algorithms import ALGORITHMS
from fedexp.errors import UsageError
from fedexp.runs import load_run
from tests.flower.helpers.fake_grid import FakeGrid
from tests.flower.helpers.publishing import broken_rules, internals

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "flower_app"
APP = EXAMPLE / "fedexp-app"
sys.path += [str(EXAMPLE), str(APP)]

import run_local  # noqa: E402
from fedexp_app import client_app, server_app  # noqa: E402
from fedexp_app.task import Net  # noqa: E402

NODES, ROUNDS = 3, 3
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def run_app(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The rows of a run of the app with three nodes."""
    small = {"clients": NODES, "rounds": ROUNDS, "min-nodes": NODES, "checkpoint": str(folder)}
    config = {**DEFAULTS, **small, **changes}
    nodes = [{"partition-id": k, "fedexp-state": f"{folder}-state"} for k in range(NODES)]
    grid = FakeGrid(client_app.app, nodes, run_config=config)
    server_app.app(grid=grid, context=Context(1, 1, {}, RecordDict(), config))
    return load_run(folder).rows


@pytest.mark.parametrize("algorithm", ["fedavg", "fedexp", "fedprox", "scaffold-exp"])
def test_the_app_trains_as_the_simulator_does(algorithm: str, tmp_path: Path) -> None:
    whole = {"batch-size": 10_000, "local-epochs": 4}  # one batch, so that no order matters
    rows = run_app(tmp_path / "run", algorithm=algorithm, **whole)
    digits = fx.tasks.digits(clients=NODES)
    torch.manual_seed(DEFAULTS["seed"])
    task = fx.supervised("digits", Net(), digits.train, digits.test)
    local = fx.LocalTraining(lr=DEFAULTS["lr"], epochs=4, batch_size=None)
    records = list(fx.simulate(task, ALGORITHMS[algorithm](), ROUNDS, NODES, local=local))
    steps = [record.server_lr for record in records]
    assert [row["server_lr"] for row in rows] == pytest.approx(steps, rel=1e-4)
    losses = [record.test_loss for record in records]
    assert [row["test_loss"] for row in rows] == pytest.approx(losses, rel=1e-4)


def test_the_configuration_changes_the_run(tmp_path: Path) -> None:
    usual = run_app(tmp_path / "usual")
    changed = run_app(tmp_path / "changed", lr=0.01, **{"local-epochs": 1})
    assert usual[-1]["test_accuracy"] > changed[-1]["test_accuracy"]
    assert max(row["server_lr"] for row in usual) > 1.0


def test_secure_sums_give_the_same_step_size(tmp_path: Path) -> None:
    plain, secure = run_app(tmp_path / "plain"), run_app(tmp_path / "secure", secure=True)
    steps = [row["server_lr"] for row in plain]
    assert [row["server_lr"] for row in secure] == pytest.approx(steps, rel=1e-3)


def test_an_unknown_algorithm_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'fedexq'; there are fedavg, fedexp"):
        run_app(tmp_path / "run", algorithm="fedexq")


@pytest.mark.parametrize("node", [{}, {"partition-id": 7}])
def test_a_node_without_its_part_of_the_data_raises(node: dict[str, Any]) -> None:
    context = Context(1, 1, node, RecordDict(), {**DEFAULTS, "clients": NODES})
    with pytest.raises(UsageError, match=r"start the node with --node-config.* from 0 to 2"):
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
    run_local.show(NODES, folders, tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000
    assert {"fedavg", "fedexp"} <= set(capsys.readouterr().out.split())


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # in Flower
def test_the_app_keeps_the_rules_of_flowers_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert broken_rules(APP) == []
    (bundle,) = tmp_path.glob("you.fedexp-app.1-0-0.*.fab")
    assert bundle.stat().st_size > 1000
    assert (APP / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_app_uses_public_names_only(tmp_path: Path) -> None:
    assert internals(APP / "fedexp_app") == []
    (tmp_path / "bad.py").write_text(
        "import fedexp as fx\nfrom fedexp.flower import Layout\nfrom fedexp.text import convert\n"
        "import fedexp.modes\nprint(fx.modes, fx.simulate)\n"
    )
    assert internals(tmp_path) == [
        "bad.py: fedexp.text convert",
        "bad.py: fedexp.modes ",
        "bad.py: fedexp modes",
    ]
