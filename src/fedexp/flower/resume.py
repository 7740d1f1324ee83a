"""The rows of a run on Flower, in the form of the simulator's, and a result out of them again.

The spec of a run on Flower: all that decides what it computes, as `spec.toml` holds it.

A run on Flower in a folder: the same files as a simulated one has, written after every round.
"""

from __future__ import annotations

import hashlib
import math
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flwr
import tomli_w
import torch
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result
from flwr.supercore import log

from fedexp.engine import SimulationState
from fedexp.errors import DivergedError, UsageError
from fedexp.flower.layout import Layout, ndarrays
from fedexp.flower.local_privacy import open_ledger
from fedexp.flower.settings import Settings
from fedexp.flower.training import Training
from fedexp.runs import is_run, load_run, read_spec
from fedexp.runs.checkpoint import to_bytes
from fedexp.runs.files import RECORDS, finite
from fedexp.runs.fingerprint import fingerprint_of_rules
from fedexp.runs.folder import RELEASES, BusyError, RunFolder, machine
from fedexp.runs.journal import Journal

if TYPE_CHECKING:
    from fedexp.flower.strategy import RuleStrategy

Row = dict[str, Any]
SCORES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
OTHER_NAMES = {"accuracy": "test_accuracy", "acc": "test_accuracy", "loss": "test_loss"}
PARTS = {
    "trained": "train_metrics_clientapp",
    "evaluated": "evaluate_metrics_clientapp",
    "central": "evaluate_metrics_serverapp",
}
OURS = {
    "round",
    "local_lr",
    "accepted",
    "initial",
    "config",
    "layout",
    *PARTS,
}  # not for clients' metrics


def row_of(round: int, result: Result, accepted: Sequence[str]) -> Row:
    """The row of a round: columns as the simulator has them, and Flower's records whole."""
    parts = {name: getattr(result, of).get(round) for name, of in PARTS.items()}
    trained: Mapping[str, Any] = parts["trained"] or {}
    row: Row = {"round": round, "server_lr": None, "local_lr": None}
    row |= {n: v for n, v in trained.items() if n not in OURS and not isinstance(v, list)}
    row |= dict.fromkeys(SCORES) | scores(parts["evaluated"]) | scores(parts["central"])
    row |= {name: int(row[name]) for name in ("clients", "dropped", "unanswered") if name in row}
    row |= {name: dict(record) for name, record in parts.items() if record is not None}
    if accepted:
        row["accepted"] = list(accepted)
    if round == 1 and 0 in result.evaluate_metrics_serverapp:
        row["initial"] = dict(result.evaluate_metrics_serverapp[0])
    return row


def changed(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a strategy has made of the config that it was given, e.g. a rate that decays."""
    return {
        name: value
        for name, value in config.items()
        if name != "server-round" and value != given.get(name) and not isinstance(value, bytes)
    }


def scores(record: Mapping[str, Any] | None) -> dict[str, float]:
    """The losses and accuracies that a report draws, by whatever usual names they have.

    >>> scores({"eval_acc": 0.5, "loss": 1.0, "num-examples": 10, "test_loss": 2.0})
    {'test_accuracy': 0.5, 'test_loss': 2.0}
    """
    found: dict[str, float] = {}
    for name, value in (record or {}).items():
        plain = name.lower().replace("-", "_")
        for prefix in ("eval_", "test_"):
            plain = plain.removeprefix(prefix)
        column = name if name in SCORES else OTHER_NAMES.get(plain)
        if column is not None and not isinstance(value, list):
            found[column] = float(value)
    return found


def check_scores(row: Row) -> None:
    """Raise `DivergedError` where the server itself measured a loss that is not finite.

    What clients measure ends no run: one client could.
    """
    for name, value in scores(row.get("central")).items():
        if name in ("train_loss", "test_loss") and not math.isfinite(value):
            raise DivergedError(row["round"], f"{name} is {value}")


def restored_result(rows: Sequence[Mapping[str, Any]]) -> Result:
    """The result of the rounds that are stored, without its arrays."""
    result = Result()
    for row in rows:
        for name, of in PARTS.items():
            if name in row:
                getattr(result, of)[row["round"]] = _record(row[name])
        if "initial" in row:
            result.evaluate_metrics_serverapp[0] = _record(row["initial"])
    return result


def _record(values: Mapping[str, Any]) -> MetricRecord:
    return MetricRecord({name: value for name, value in values.items() if value is not None})


def frozen(strategy: RuleStrategy, training: Training, config: ConfigRecord) -> dict[str, Any]:
    """The spec, with the words of a simulated one where they mean the same."""
    settings = training.settings
    spec = {
        "task": settings.name,
        "algorithm": settings.algorithm.name,
        "mode": "paper",
        "seed": settings.seed,
        "rounds": training.rounds,
        "evaluate_every": 1,
        "engine": "flower",
        "deterministic": False,
        "study": training.study,
        "model": _model(training.server.layout),
        "set": {},
        "options": _options(strategy, settings, config),
    }
    return tomllib.loads(tomli_w.dumps(spec))


def _options(strategy: RuleStrategy, settings: Settings, config: ConfigRecord) -> dict[str, Any]:
    algorithm = settings.algorithm
    options = {
        **_fields(algorithm.client),
        **_fields(algorithm.server),
        "average_last": algorithm.iterates,
        "weighting": settings.weighting,
        "fraction_train": strategy.fraction_train,
        "min_train_nodes": strategy.min_train_nodes,
        "total_clients": settings.total_clients,
        "max_norm": settings.max_norm,
        "min_replies": settings.min_replies if settings.min_replies > 1 else None,
        "weighted_by_key": _weight_key(strategy, settings),
        **{f"privacy.{name}": value for name, value in _fields(settings.privacy).items()},
        **{f"secure.{name}": value for name, value in _fields(settings.secure).items()},
        **{f"train_config.{name}": value for name, value in config.items()},
    }
    return {name: _plain(value) for name, value in options.items() if value is not None}


def _weight_key(strategy: RuleStrategy, settings: Settings) -> str | None:
    """Return the metric that weighs clients where it is not the usual one."""
    key = strategy.weighted_by_key
    return None if settings.weighting == "uniform" or key == "num-examples" else key


def _fields(rule: Any) -> dict[str, Any]:
    """The options of a rule or of settings, which are dataclasses; nothing of None."""
    if not is_dataclass(rule):
        return {}
    return {each.name: getattr(rule, each.name) for each in fields(rule)}


def _plain(value: Any) -> Any:
    """As TOML holds it; infinity in words, as everywhere, and so is what only Python knows."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _model(layout: Layout) -> str:
    """The model in a few words, and a digest of the names, shapes and types of its arrays."""
    slots = "\n".join(f"{s.name} {s.shape} {s.dtype} {s.kind}{s.source}" for s in layout.slots)
    digest = hashlib.sha256(slots.encode()).hexdigest()[:10]
    return f"{len(layout.slots)} arrays, {layout.dim} parameters ({digest})"


HEAD = "# A run of fedexp on Flower, frozen. Start it again with checkpoint=THIS-FOLDER\n"
LETS_GO = 30.0  # seconds
REMEDIES = {
    "start over with --restart": "remove the folder to begin again",
    "use --no-save": "leave checkpoint out",
    "or --no-save": "or leave checkpoint out",
}


class Book:
    """Where the rows of a run go; in memory only, this one, so nowhere.

    Attributes:
        rows: of the rounds before this start.
        over: whether there is nothing left to do.
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.rows, self.over = list(rows), False

    def add(self, row: Row, state: SimulationState) -> None:
        """A round is complete."""

    def finish(self, error: DivergedError | None) -> None:
        """The run is over."""


class DiskBook(Book):
    """The rows and states of a run in its folder."""

    def __init__(self, journal: Journal, training: Training) -> None:
        super().__init__(journal.rows)
        self.journal, self.training = journal, training

    def add(self, row: Row, state: SimulationState) -> None:
        self.journal.add(finite(row), state)

    def finish(self, error: DivergedError | None) -> None:
        arrays = ndarrays(self.training.server.output())
        named = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
        status = "diverged" if error else "finished"
        self.journal.conclude(status, to_bytes(named), error)


@contextmanager
def opened(strategy: RuleStrategy, training: Training, config: ConfigRecord) -> Iterator[Book]:
    """The book of a run, with the training put where the run was left."""
    if training.settings.checkpoint is None:
        yield Book()
        return
    path = Path(training.settings.checkpoint)
    with _in_our_words():
        if is_run(path):
            training.study = str(read_spec(path).get("study", training.study))
        spec = frozen(strategy, training, config)
        about = {**machine(), "flwr": flwr.__version__, "metric": "test_accuracy", "target": None}
        with ExitStack() as stack:
            content = fingerprint_of_rules(training.settings.algorithm)
            folder = _held(stack, RunFolder(path, spec, about, HEAD, content))
            diverged = _reopened(folder)
            journal = Journal(folder, 0.0, torch.device("cpu"))
            stack.callback(journal.close)
            if diverged is not None:
                text = (
                    "%s diverged at round %s (%s); resuming from its last good state, of round %d"
                )
                log(WARNING, text, path, *diverged, journal.resumed_from)
            yield _restored(folder, journal, training)


def _held(stack: ExitStack, folder: RunFolder) -> RunFolder:
    """The folder, held; the ServerApp of a SuperLink that died may take a while to let it go."""
    end = time.monotonic() + LETS_GO
    while True:
        try:
            return stack.enter_context(folder)
        except BusyError:
            if time.monotonic() >= end:
                raise
            time.sleep(min(1.0, LETS_GO))


def _reopened(folder: RunFolder) -> tuple[int, str] | None:
    """Let a run that ended as diverged continue: the round and the reason; None for any other."""
    result = load_run(folder.path).result
    if result is None or folder.reopen() is None:
        return None
    return result["diverged_at"], result.get("reason", "the model")


def _restored(folder: RunFolder, journal: Journal, training: Training) -> DiskBook:
    book = DiskBook(journal, training)
    if journal.state is not None:
        _restore(training, journal.state, journal.rows, folder.path)
    result = load_run(folder.path).result
    book.over = result is not None
    if book.over:
        log(INFO, "%s holds a finished run; nothing is left to do", folder.path)
    elif training.settings.privacy is not None:
        reported = sum("epsilon" in row for row in book.rows)
        training.ledger = open_ledger(folder.path / RELEASES, reported)
    if not book.over and journal.resumed_from:
        log(INFO, "going on in %s after round %d", folder.path, journal.resumed_from)
        folder.note_resumed(journal.resumed_from)
    return book


def _restore(training: Training, state: SimulationState, rows: Sequence[Row], folder: Path) -> None:
    """Put the training where the run was left; refuse rows that no run on Flower has written."""
    try:
        training.restore(state, rows)
        restored_result(rows)
        ConfigRecord(rows[-1].get("config", {}))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise UsageError(
            f"{folder / RECORDS} is damaged: its rows are not those of a run on Flower "
            f"({type(error).__name__}); restore it, or remove the folder to begin again"
        ) from error


@contextmanager
def _in_our_words() -> Iterator[None]:
    """Remedies that name options of the command line, for those who have none."""
    try:
        yield
    except UsageError as error:
        text = str(error)
        for theirs, ours in REMEDIES.items():
            text = text.replace(theirs, ours)
        if text == str(error):
            raise
        raise UsageError(text) from error
