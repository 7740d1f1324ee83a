"""Stored runs: finished ones return at once, interrupted ones end as uninterrupted ones do."""

from __future__ import annotations

import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedexp as fx
from fedexp.engine import EngineName, SimulationState, simulation
from fedexp.engine.plan import Work
from fedexp.engine.select import Selected, select_engine
from fedexp.experiment import Experiment
from fedexp.models import mlp
from fedexp.precision import Precision
from fedexp.runs import RunWarning, execute, find_runs, folder_of, load_run
from fedexp.runs.folder import RunFolder
from tests.runs.helpers import essence, execute_in, interrupted, tiny, untimed


def test_a_run_that_another_process_ends_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, opening = tiny(), RunFolder.of

    def late(path: Path, experiment: Experiment, restart: bool) -> RunFolder:
        monkeypatch.setattr(RunFolder, "of", opening)
        execute_in(tmp_path, experiment)  # between our look at the folder and our hold of it
        return opening(path, experiment, restart)

    monkeypatch.setattr(RunFolder, "of", late)
    outcome = execute_in(tmp_path, experiment)
    assert outcome.stored == len(outcome.rows) == 6
    assert outcome.folder is not None
    assert "resumed" not in load_run(outcome.folder).environment


def test_a_run_leaves_what_it_promises(tmp_path: Path) -> None:
    experiment = tiny()
    folder = folder_of(experiment, tmp_path)
    assert folder == tmp_path / experiment.id
    outcome = execute_in(folder, experiment)
    assert outcome.folder == folder
    stored = load_run(folder)
    assert untimed(stored.rows) == untimed(outcome.rows)
    assert untimed(outcome.rows) == untimed(execute(experiment).rows)
    assert stored.spec["options"]["server.beta"] == 0.9
    assert stored.spec["set"] == experiment.options
    assert stored.environment["fedexp"] == fx.__version__
    assert stored.result == {
        "status": "finished", "rounds": 6, "diverged_at": None, "seconds": outcome.seconds,
    }  # fmt: skip
    last = list(experiment.records())[-1]
    assert torch.equal(load_file(folder / "model.safetensors")["params"], last.state.output()[0])
    assert replace(stored.outcome(), stored=0) == outcome


@pytest.mark.parametrize("every", [0.0, 10.0])
def test_a_finished_run_stores_no_client_state(every: float, tmp_path: Path) -> None:
    """It can be gigabytes, and training is over."""
    execute_in(tmp_path, tiny("scaffold"), checkpoint_every=every)
    found = sorted(path.name for path in tmp_path.glob("checkpoint*"))
    assert found == ["checkpoint-6.safetensors", "checkpoint.json"]
    (tmp_path / "result.json").unlink()
    assert execute_in(tmp_path, tiny("scaffold")).stored == 6


def test_the_model_of_a_network_loads_into_it(tmp_path: Path) -> None:
    experiment = Experiment("digits-mlp", "fedexp", rounds=1, options={"local.steps": 1})
    execute_in(tmp_path, experiment)
    (record,) = experiment.records()
    module = experiment.problem.objective.load(*record.state.output())  # type: ignore[attr-defined]
    named = load_file(tmp_path / "model.safetensors")
    assert named.keys() == module.state_dict().keys()
    assert all(torch.equal(named[name], value) for name, value in module.state_dict().items())


def test_a_finished_run_returns_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise AssertionError("nothing should train here")

    first = execute_in(tmp_path / "a", tiny())
    monkeypatch.setattr(sys.modules["fedexp.experiment"], "train", refuse)
    seen: list[int] = []
    again = execute_in(tmp_path / "a", tiny(), lambda _, row: seen.append(row["round"]))
    assert (again.rows, again.seconds, again.stored) == (first.rows, first.seconds, 6)
    assert seen == [1, 2, 3, 4, 5, 6]
    with pytest.raises(AssertionError, match="nothing should train"):
        execute_in(tmp_path / "b", tiny())


@pytest.mark.parametrize("algorithm", ["fedexp-m", "scaffold-exp", "fedadagrad"])
def test_interrupted_twice_it_ends_as_one_that_never_was(algorithm: str, tmp_path: Path) -> None:
    experiment = tiny(algorithm)
    execute_in(tmp_path / "whole", experiment)
    interrupted(experiment, tmp_path / "parts", 2)
    interrupted(experiment, tmp_path / "parts", 5)
    outcome = execute_in(tmp_path / "parts", experiment)
    assert outcome.stored == 5
    assert essence(tmp_path / "parts") == essence(tmp_path / "whole")
    resumed = load_run(tmp_path / "parts").environment["resumed"]
    assert [each["round"] for each in resumed] == [2, 5]


def test_a_resumed_run_asks_for_the_engine_of_its_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which engine pays depends on the cohort; one chosen anew might round differently."""
    asked: list[tuple[int, list[int], int]] = []

    def choose(
        name: EngineName, work: Work, state: SimulationState, precision: Precision
    ) -> Selected:
        asked.append((work.round, work.cohort.tolist(), state.round))
        return select_engine(name, work, state, precision)

    monkeypatch.setattr(simulation, "select_engine", choose)
    interrupted(tiny(), tmp_path / "a", 3)
    execute_in(tmp_path / "a", tiny())
    assert asked[0][0] == 1
    assert asked[0] == asked[1]


def test_rows_after_the_checkpoint_are_made_again(tmp_path: Path) -> None:
    execute_in(tmp_path / "whole", tiny())
    interrupted(tiny(), tmp_path / "a", 3)
    with (tmp_path / "a" / "records.jsonl").open("ab") as records:
        records.write(b'{"round": 4, "train_loss": 0.123}\n{"round": 5, "train_l')
    assert [row["round"] for row in load_run(tmp_path / "a").rows] == [1, 2, 3, 4]
    execute_in(tmp_path / "a", tiny())
    assert essence(tmp_path / "a") == essence(tmp_path / "whole")


def test_a_target_ends_a_run_and_its_status_says_so(tmp_path: Path) -> None:
    whole = execute(tiny(rounds=30))
    target = whole.rows[11]["train_loss"]
    outcome = execute_in(tmp_path / "a", tiny(rounds=30, stop_at=target))
    assert (len(outcome.rows), outcome.status) == (12, "target")
    assert untimed(outcome.rows) == untimed(whole.rows[:12])
    (tmp_path / "a" / "result.json").unlink()  # as if killed just before the end
    again = execute_in(tmp_path / "a", tiny(rounds=30, stop_at=target))
    assert (len(again.rows), again.status) == (12, "target")
    assert execute(tiny(stop_at=target / 1e9)).status == "finished"


def test_divergence_is_stored_with_its_reason(tmp_path: Path) -> None:
    experiment = tiny("fedexp", 30, {"local.lr": 5})
    outcome = execute_in(tmp_path, experiment)
    assert outcome.status == "diverged"
    assert outcome.diverged_at == len(outcome.rows) + 1
    assert "norm of the model" in outcome.reason
    again = execute_in(tmp_path, experiment)
    assert again == replace(outcome, stored=len(outcome.rows))


def test_a_folder_of_another_run_or_of_something_else_is_refused(tmp_path: Path) -> None:
    execute_in(tmp_path / "a", tiny())
    with pytest.raises(fx.UsageError, match="holds another run: there rounds is 6, here it is 7"):
        execute_in(tmp_path / "a", tiny(rounds=7))
    with pytest.raises(fx.UsageError, match=r"options.server.eps is 0.0, here it is 0.5"):
        execute_in(tmp_path / "a", tiny(options={"eps": 0.5}))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("years of work")
    for restart in (False, True):
        with pytest.raises(fx.UsageError, match="holds no run"):
            execute_in(tmp_path / "b", tiny(), restart=restart)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["thesis.tex"]


def test_another_version_is_warned_of_and_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    interrupted(tiny(), folder, 2)
    path = folder / "environment.json"
    path.write_text(path.read_text().replace(fx.__version__, "0.0.9"))
    with pytest.warns(RunWarning, match=r"was started with fedexp 0\.0\.9"):
        assert len(execute_in(folder, tiny()).rows) == 6


def test_runs_are_found_in_folders_of_folders(tmp_path: Path) -> None:
    for name in ("b", "a/x", "a/y"):
        execute_in(tmp_path / name, tiny(rounds=1))
    names = ["a/x", "a/y", "b"]
    assert find_runs([tmp_path]) == [tmp_path / name for name in names]
    assert find_runs([tmp_path / "b", tmp_path]) == [tmp_path / n for n in ("b", "a/x", "a/y")]
    with pytest.raises(fx.UsageError, match="there is no run in"):
        find_runs([tmp_path / "nothing"])


def test_the_deterministic_mode_is_put_back(tmp_path: Path) -> None:
    def check(experiment: Experiment, row: dict[str, Any]) -> None:
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic

    outcome = execute_in(tmp_path, tiny(deterministic=True), check)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    assert untimed(outcome.rows) == untimed(execute(tiny()).rows)


def test_a_run_trains_once_and_builds_its_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[nn.Module] = []
    trained: list[Experiment] = []

    def build(*sizes: Any) -> nn.Module:
        built.append(mlp(*sizes))
        return built[-1]

    def records(experiment: Experiment, *arguments: Any) -> Generator[fx.Record, None, None]:
        trained.append(experiment)
        return train(experiment, *arguments)

    train = Experiment.records
    monkeypatch.setattr(sys.modules["fedexp.tasks.digits"], "mlp", build)
    monkeypatch.setattr(Experiment, "records", records)
    outcome = execute_in(tmp_path, Experiment("digits", "fedexp", rounds=2))
    assert (len(outcome.rows), len(built), len(trained)) == (2, 1, 1)


def test_the_outcome_is_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("nothing should be read")

    monkeypatch.setattr(sys.modules["fedexp.runs.execute"], "load_run", refuse)
    assert len(execute_in(tmp_path, tiny()).rows) == 6


def test_the_engine_is_recorded(tmp_path: Path) -> None:
    execute_in(tmp_path, tiny(engine="loop"))
    assert load_run(tmp_path).environment["engine"]["name"] == "loop"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cohort": 5}, "the cohort of 5 is larger than the federation of 4 clients"),
        ({"engine": "warp"}, "engine is one of"),
        ({"device": "warp"}, "unknown device 'warp'"),
        ({"precision": "tf32"}, "tf32 is a mode of NVIDIA GPUs"),
        ({"evaluate_every": -1}, "evaluate_every must be at least 1"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_spec_that_cannot_run_leaves_no_folder(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(fx.UsageError, match=message):
        execute_in(tmp_path / "runs" / "a", tiny(**change))
    assert not list(tmp_path.iterdir())
