"""Loggers of a run: TensorBoard, Weights & Biases, MLflow.

A logger is notified of the beginning, of every round and of the end. The run folder holds
everything already, so a logger that fails does not end the run.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedexp.errors import UsageError, check_name, first_line
from fedexp.experiment import Logger
from fedexp.optional import extra
from fedexp.plain import flat

PROJECT = "fedexp"
MLFLOW_ID = "mlflow-run-id"


class LoggerWarning(UserWarning):
    """A logger failed while the run continued."""


class TensorBoard:
    """Event files in the run folder, so that `tensorboard --logdir runs` shows every run."""

    def __init__(self, folder: Path) -> None:
        extra("tensorboard", "TensorBoard", group="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._new_writer: Callable[..., Any] = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def begin(self, spec: Mapping[str, Any], resumed_from: int) -> None:
        # A run that was killed or restarted has logged rounds that now come once more.
        self._writer = self._new_writer(str(self._folder), purge_step=resumed_from + 1)
        if not resumed_from:
            self._writer.add_text("spec", _as_markdown(flat(spec)), 0)

    def on_round(self, row: Mapping[str, Any]) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(_grouped(name), value, row["round"])
        self._writer.flush()  # buffered events would be lost to SIGKILL

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, offline with WANDB_MODE=offline; resumed under the same id."""

    def __init__(self, folder: Path) -> None:
        self._wandb = extra("wandb", "Weights & Biases", group="wandb")
        self._folder = folder
        self._run: Any = None

    def begin(self, spec: Mapping[str, Any], resumed_from: int) -> None:
        name = self._folder.resolve().name
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=name,
            name=name,
            dir=str(self._folder),
            config=flat(spec),
            resume="allow",
        )

    def on_round(self, row: Mapping[str, Any]) -> None:
        self._run.log(scalars(row), step=row["round"])

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._run.summary["status"] = result["status"] if result else "interrupted"
        self._run.finish(exit_code=0 if result else 1)


class MLflow:
    """A run of MLflow, wherever MLFLOW_TRACKING_URI points; the run folder stores its id."""

    def __init__(self, folder: Path) -> None:
        self._mlflow = extra("mlflow", "MLflow", "mlflow-skinny", group="mlflow")
        self._folder = folder
        self._logged = 0  # MLflow cannot delete a round, so none may be logged twice

    def begin(self, spec: Mapping[str, Any], resumed_from: int) -> None:
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        id_file = self._folder / MLFLOW_ID
        before = id_file.read_text().strip() if resumed_from and id_file.exists() else None
        run = self._mlflow.start_run(run_id=before, run_name=self._folder.resolve().name)
        if before is None:
            id_file.write_text(run.info.run_id + "\n")
            self._mlflow.log_params(flat(spec))
        else:
            history = self._mlflow.MlflowClient().get_metric_history(before, "clients")
            self._logged = max((metric.step for metric in history), default=0)

    def on_round(self, row: Mapping[str, Any]) -> None:
        if row["round"] > self._logged:
            self._mlflow.log_metrics(scalars(row), step=row["round"])

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result:
            self._mlflow.set_tag("status", result["status"])
        self._mlflow.end_run("FINISHED" if result else "KILLED")


class GuardedLogger:
    """A logger whose failure becomes a warning.

    What fails at the beginning is a setting to fix; what fails later, a server that went away.
    """

    def __init__(self, name: str, logger: Logger) -> None:
        self._name, self._logger, self._failed = name, logger, False

    @classmethod
    def of(cls, logger: Logger) -> GuardedLogger:
        """Return the logger guarded under the name of its class, unless it is already."""
        return logger if isinstance(logger, cls) else cls(type(logger).__name__, logger)

    def begin(self, spec: Mapping[str, Any], resumed_from: int) -> None:
        try:
            self._logger.begin(spec, resumed_from)
        except Exception as error:
            raise UsageError(f"cannot log to {self._name}: {first_line(error)}") from error

    def on_round(self, row: Mapping[str, Any]) -> None:
        self._try(lambda: self._logger.on_round(row))

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._try(lambda: self._logger.end(result))

    def _try(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:
            self._failed = True
            warnings.warn(
                f"logging to {self._name} failed and is now off: {first_line(error)}; training "
                "continues, and the run folder has every round",
                LoggerWarning,
                stacklevel=3,
            )


LOGGERS: dict[str, Callable[[Path], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}


def logger_named(name: str, folder: Path) -> Logger:
    """Return the logger of that name for the run in `folder`; a missing library raises at once."""
    check_name("logger", name, LOGGERS)
    return GuardedLogger(name, LOGGERS[name](folder))


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row, without the round.

    >>> scalars({"round": 3, "train_loss": 0.5, "test_loss": None, "clients": 10})
    {'train_loss': 0.5, 'clients': 10.0}
    """
    numbers = {k: v for k, v in row.items() if k != "round" and isinstance(v, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def _grouped(name: str) -> str:
    """Return the tag of a metric: TensorBoard groups tags by what precedes `/`."""
    kind = name.rpartition("_")[2]
    return f"{kind}/{name}" if kind in ("loss", "accuracy") else f"round/{name}"


def _as_markdown(pairs: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {value} |" for name, value in pairs.items()]
    return "\n".join(["| option | value |", "| --- | --- |", *lines])
