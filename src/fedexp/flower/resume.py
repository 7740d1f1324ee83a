"""A run on Flower in a folder: the same files as a simulated one has, written after every round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING

import flwr
import torch
from flwr.app import ConfigRecord
from flwr.supercore import log

from fedexp.engine import SimulationState
from fedexp.errors import DivergedError, UsageError
from fedexp.experiments.fingerprint import fingerprint_of_rules
from fedexp.flower.budget import open_ledger
from fedexp.flower.layout import ndarrays
from fedexp.flower.rows import Row, restored_result
from fedexp.flower.spec import frozen
from fedexp.flower.training import Training
from fedexp.runs import is_run, load_run, read_spec
from fedexp.runs.folder import RELEASES, BusyError, RunFolder, machine
from fedexp.runs.foreign import finite
from fedexp.runs.journal import Journal
from fedexp.runs.records import RECORDS
from fedexp.runs.tensors import to_bytes

if TYPE_CHECKING:
    from fedexp.flower.strategy import RuleStrategy

HEAD = "# A run of fedexp on Flower, frozen. Start it again with checkpoint=THIS-FOLDER\n"
LETS_GO = 30.0  # seconds
REMEDIES = {
    "begin again with --restart": "remove the folder to begin again",
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
