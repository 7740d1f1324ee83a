"""What TensorBoard, W&B and MLflow log of a run, and of a resumed run."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedexp.errors import UsageError
from fedexp.experiment import Logger
from fedexp.runs.loggers import GuardedLogger, LoggerWarning, logger_named

SPEC = {"task": "toy", "rounds": 6, "set": {}, "options": {"server.eps": 0.25}}
FINISHED = {"status": "finished", "rounds": 6}


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [
        {"round": n, "train_loss": 1 / n, "test_loss": None, "server_lr": 1.5, "clients": 2}
        for n in range(first, last + 1)
    ]


def log(logger: Logger, first: int, last: int, resumed_from: int = 0) -> None:
    logger.begin(SPEC, resumed_from)
    for row in rows(first, last):
        logger.on_round(row)


def test_tensorboard_has_each_round_once_after_a_kill(tmp_path: Path) -> None:
    """Killed after round 5, with the checkpoint of round 3: rounds 4 and 5 come a second time."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(logger_named("tensorboard", tmp_path), 1, 5)  # and no end
    again = logger_named("tensorboard", tmp_path)
    log(again, 4, 6, resumed_from=3)
    again.end(FINISHED)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss/train_loss", "round/server_lr", "round/clients"}
    logged = {event.step: event.value for event in events.Scalars("loss/train_loss")}
    assert logged == pytest.approx({n: 1 / n for n in range(1, 7)})
    assert len(events.Scalars("loss/train_loss")) == 6
    (text,) = events.Tensors("spec/text_summary")
    assert b"| options.server.eps | 0.25 |" in text.tensor_proto.string_val[0]


class FakeWandb(ModuleType):
    """The part of wandb that the logger calls."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.summary: dict[str, str] = {}
        self.exits: list[int] = []

    def init(self, **how: Any) -> FakeWandb:
        self.started.append(how)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged[step] = values

    def finish(self, exit_code: int) -> None:
        self.exits.append(exit_code)


def test_wandb_resumes_under_the_id_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    interrupted = logger_named("wandb", tmp_path)
    log(interrupted, 1, 3)
    interrupted.end(None)
    again = logger_named("wandb", tmp_path)
    log(again, 4, 6, resumed_from=3)
    again.end(FINISHED)
    first, second = wandb.started
    assert first == second
    assert (first["id"], first["resume"], first["project"]) == (tmp_path.name, "allow", "fedexp")
    assert first["config"]["options.server.eps"] == 0.25
    assert wandb.logged[2] == {"train_loss": 0.5, "server_lr": 1.5, "clients": 2.0}
    assert sorted(wandb.logged) == [1, 2, 3, 4, 5, 6]
    assert wandb.exits == [1, 0]
    assert wandb.summary == {"status": "finished"}


class FakeMLflow(ModuleType):
    """The part of mlflow that the logger calls, with one run at a time."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.params: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, list[int]] = defaultdict(list)
        self.ended: list[str] = []
        self.experiment = self.active = ""

    def set_experiment(self, name: str) -> None:
        self.experiment = name

    def start_run(self, run_id: str | None, run_name: str) -> SimpleNamespace:
        self.active = run_id or f"{run_name}#{len(self.params)}"
        return SimpleNamespace(info=SimpleNamespace(run_id=self.active))

    def log_params(self, params: dict[str, Any]) -> None:
        self.params[self.active] = params

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.steps[self.active].append(step)

    def MlflowClient(self) -> FakeMLflow:
        return self

    def get_metric_history(self, run_id: str, name: str) -> list[SimpleNamespace]:
        assert name in ("clients", "train_loss")
        return [SimpleNamespace(step=step) for step in self.steps[run_id]]

    def set_tag(self, name: str, value: str) -> None:
        self.params[self.active][name] = value

    def end_run(self, status: str) -> None:
        self.ended.append(status)


def test_mlflow_resumes_its_own_run_and_logs_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    interrupted = logger_named("mlflow", tmp_path)
    log(interrupted, 1, 4)
    interrupted.end(None)
    again = logger_named("mlflow", tmp_path)
    log(again, 4, 6, resumed_from=3)
    again.end(FINISHED)
    ((name, params),) = mlflow.params.items()
    assert params["options.server.eps"] == 0.25
    assert params["status"] == "finished"
    assert mlflow.steps == {name: [1, 2, 3, 4, 5, 6]}
    assert mlflow.ended == ["KILLED", "FINISHED"]
    assert mlflow.experiment == "fedexp"


class Failing:
    """Fails from the given round on."""

    def __init__(self, from_round: int) -> None:
        self.from_round, self.seen = from_round, 0

    def begin(self, spec: Any, resumed_from: int) -> None:
        if self.from_round == 0:
            raise RuntimeError("no such server\nand a long story")

    def on_round(self, row: Any) -> None:
        self.seen += 1
        if row["round"] >= self.from_round:
            raise RuntimeError("the server went away")

    def end(self, result: Any) -> None:
        raise AssertionError("not called after a failure")


def test_a_logger_that_fails_later_does_not_cost_the_run() -> None:
    failing = Failing(from_round=2)
    guarded = GuardedLogger("mlflow", failing)
    with pytest.warns(LoggerWarning, match="the server went away; training continues") as caught:
        log(guarded, 1, 6)
    guarded.end(FINISHED)  # a second warning would be an error here
    assert len(caught) == 1
    assert failing.seen == 2


def test_a_logger_that_cannot_begin_is_reported_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"^cannot log to mlflow: no such server$"):
        GuardedLogger("mlflow", Failing(from_round=0)).begin(SPEC, 0)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_library_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"pip install 'fedexp\[{name}\]'"):
        logger_named(name, tmp_path)


def test_a_misspelt_name_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean tensorboard"):
        logger_named("tensorbord", tmp_path)
