"""The study file: values and scores of all trials, as Optuna studies in SQLite.

Any number of processes can work on a study. Each locks the study while it reads or writes, and
locks every trial that it runs, so that no trial is run twice. The locks are files beside the study
that the operating system unlocks when their process ends: the trials of a killed process are free
at once. On a file system shared by several machines they work between machines if it supports file
locks.

A trial of a grid is written in one transaction when it has finished. A trial of a free search is in
the study while it runs; one that a killed process left behind is queued again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedexp.errors import UsageError, require, shown
from fedexp.optional import extra
from fedexp.runs.fingerprint import Fingerprint, joined
from fedexp.storage import lock_file
from fedexp.tuning.grids import Point, Values

if TYPE_CHECKING:
    import optuna

ATTRIBUTE = "fedexp"  # user attribute: settings of a study, details of a trial
FINGERPRINT = "fingerprint"  # key of the settings: digests of the data, the model and the code
STUDY = "choose another --study (store= in Python)"
REMEDY = f"{STUDY}, or delete it"
WARMUP_ROUNDS = 10  # of a trial before it can be pruned
STARTUP_TRIALS = 5  # finished before one can be pruned


@dataclass(frozen=True)
class TrialResult:
    """The score of a trial and how it came about.

    Attributes:
        score: metric averaged over the window; the worst possible value if the trial diverged or
            was pruned.
        diverged_at: round in which it diverged, if it did.
        pruned: whether it was stopped early.
        test: test accuracy (or loss) after the last round, not used for selection; None without
            test data.
        step: median server step size.
        averages: whether every server step size was 1, that of FedAvg.
    """

    score: float
    diverged_at: int | None = None
    pruned: bool = False
    test: float | None = None
    step: float | None = None
    averages: bool = False


@dataclass(frozen=True)
class Trial:
    """A finished trial: its values and its result."""

    point: Point
    result: TrialResult


@contextmanager
def open_study(
    path: Path, name: str, settings: Mapping[str, Any], values: Values, higher: bool, seed: int
) -> Iterator[StudyStore]:
    """Create or open a study; raise `UsageError` if it has other settings.

    Args:
        path: SQLite file; it can hold several studies.
        name: name of the study.
        settings: everything that decides the scores, as plain values.
        values: values of a grid, or ends of the ranges of a free search, per option.
        higher: whether larger scores are better.
        seed: seed of a free search.
    """
    optuna = extra("optuna", "tuning", group="tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _storage_errors(path), closing(StudyLocks(path)) as locks:
        with locks.study():
            if not path.exists():
                _create_tables(path)
            storage = optuna.storages.RDBStorage(_url(path))
        try:
            with locks.study():
                study = optuna.create_study(
                    storage=storage,
                    study_name=name,
                    direction="maximize" if higher else "minimize",
                    load_if_exists=True,
                    pruner=optuna.pruners.MedianPruner(STARTUP_TRIALS, WARMUP_ROUNDS),
                )
                _check_settings(study, json.loads(json.dumps(settings)), path)
            yield StudyStore(study, values, seed, locks, path)
        finally:
            storage.remove_session()
            storage.engine.dispose()


def _url(path: Path) -> str:
    """Return the address of a SQLite file; Optuna calls `str.format` on it."""
    return f"sqlite:///{path}".replace("{", "{{").replace("}", "}}")


def _create_tables(path: Path) -> None:
    """Create an empty storage under a temporary name and move it into place when it is complete.

    SQLite commits each CREATE on its own: a process killed between two of them would leave a file
    without the index that makes names of studies unique.
    """
    optuna = extra("optuna", "tuning", group="tune")
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.unlink(missing_ok=True)
    storage = optuna.storages.RDBStorage(_url(unfinished))
    storage.remove_session()
    storage.engine.dispose()
    unfinished.replace(path)


class StudyStore:
    """An open study; see `open_study`. Operations in one `locked` block are atomic."""

    def __init__(
        self, study: optuna.Study, values: Values, seed: int, locks: StudyLocks, path: Path
    ) -> None:
        self._study, self._values, self._seed, self._path = study, values, seed, path
        self._locks, self.locked = locks, locks.study

    def trials(self) -> list[Trial]:
        """Return the finished trials, in the order in which they started."""
        from optuna.trial import TrialState

        try:
            with self.locked():
                over = self._study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
            return [
                Trial(dict(each.params), _read_result(each.value, each.user_attrs[ATTRIBUTE]))
                for each in over
                if each.value is not None
            ]
        # Optuna and `_read_result` raise these for content that another program has written.
        except (LookupError, TypeError, ValueError, RecursionError, OverflowError) as error:
            raise UsageError(
                f"{self._path} holds trials that cannot be read ({shown(error)}); {STUDY}"
            ) from error

    def acquire(self, number: int) -> bool:
        """Lock a trial for this process; return False if it is locked already."""
        with self.locked():
            return self._locks.acquire(self._lock_name(number))

    def add(self, number: int, point: Point, result: TrialResult) -> None:
        """Store a finished point of a grid, and unlock it; it was acquired as `number`."""
        import optuna

        kinds: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(values)
            for name, values in self._values.items()
        }
        trial = optuna.create_trial(
            params=point,
            distributions=kinds,
            value=result.score,
            user_attrs={ATTRIBUTE: _details(result)},
        )
        with self.locked():
            self._study.add_trial(trial)
            self._release(number)

    def count_started(self) -> int:
        """Return how many trials of a free search have finished or are running.

        Trials that a killed process left behind are queued again, and `ask` returns them first.
        """
        from optuna.trial import TrialState

        with self.locked():
            running = self._study.get_trials(states=(TrialState.RUNNING,))
            abandoned = [each for each in running if self.acquire(each.number)]
            for each in abandoned:
                self._study.tell(each.number, state=TrialState.FAIL)
                self._study.enqueue_trial(each.params)
                self._release(each.number)
            return len(self.trials()) + len(running) - len(abandoned)

    def ask(self, first: Point) -> tuple[optuna.Trial, Point]:
        """Return the next trial of a free search, acquired, and its values.

        Args:
            first: values of the very first trial; those that it leaves out are sampled.
        """
        import optuna

        with self.locked():
            known = len(self._study.get_trials())
            if not known:
                self._study.enqueue_trial(first)
            # Another seed per trial, so that no two processes draw the same values.
            self._study.sampler = optuna.samplers.TPESampler(seed=self._seed + 1000 * known)
            trial = self._study.ask()
            self.acquire(trial.number)
            return trial, {
                name: trial.suggest_float(name, low, high, log=True)
                for name, (low, high) in self._values.items()
            }

    def should_prune(self, trial: optuna.Trial, value: float, round: int) -> bool:
        """Report the metric of a round of a free search; return whether to prune the trial."""
        with self.locked():
            trial.report(value, round)
            return trial.should_prune()

    def tell(self, trial: optuna.Trial, result: TrialResult) -> None:
        """Store a finished trial of a free search, and unlock it."""
        from optuna.trial import TrialState

        with self.locked():
            trial.set_user_attr(ATTRIBUTE, _details(result))
            if result.pruned:
                self._study.tell(trial, state=TrialState.PRUNED)
            else:
                self._study.tell(trial, result.score)
            self._release(trial.number)

    def _release(self, number: int) -> None:
        self._locks.release(self._lock_name(number))

    def _lock_name(self, number: int) -> str:
        return f"{self._study.study_name} {number}".replace(" ", "-")


def _read_result(score: float, details: Mapping[str, Any]) -> TrialResult:
    """Return the stored result of a trial; raise `TypeError` for anything else."""
    result = TrialResult(score=score, **details)
    numbers = (result.score, result.diverged_at, result.test, result.step)
    kinds = (isinstance(each, int | float | None) for each in numbers)
    if not all(kinds) or not all(isinstance(b, bool) for b in (result.pruned, result.averages)):
        raise TypeError("a score is not a number")
    return result


def _details(result: TrialResult) -> dict[str, Any]:
    """Return all but the score, which Optuna stores, and which JSON cannot hold if infinite."""
    return {name: value for name, value in asdict(result).items() if name != "score"}


class StudyLocks:
    """The locks of a study file and of the trials that this process runs.

    Args:
        path: the study file; it can hold several studies.
    """

    def __init__(self, path: Path) -> None:
        require(not path.is_dir(), f"{path} is a folder; name a file")
        self._path, self._folder = path, path.with_name(f".{path.name}.claims")
        self._trials: dict[str, IO[bytes]] = {}
        self._locked = False

    @contextmanager
    def study(self) -> Iterator[None]:
        """Lock the study file for this process; waits for the lock. May be nested."""
        if self._locked:
            yield
            return
        with self._disk_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = lock_file(self._path.with_name(f".{self._path.name}.lock"), REMEDY, wait=True)
        with lock:
            self._locked = True
            try:
                yield
            finally:
                self._locked = False

    def acquire(self, name: str) -> bool:
        """Lock a trial; return False if it is locked already, be it by this process."""
        with self._disk_errors():
            self._folder.mkdir(exist_ok=True)
            try:
                self._trials[name] = lock_file(self._folder / name, REMEDY)
            except BlockingIOError:
                return False
        return True

    def release(self, name: str) -> None:
        """Unlock a trial of this process."""
        with self._disk_errors():
            (self._folder / name).unlink(missing_ok=True)
        self._trials.pop(name).close()

    def close(self) -> None:
        """Unlock all trials of this process; remove the folder of locks if it is empty."""
        with self.study():
            for name in list(self._trials):
                self.release(name)
            with suppress(OSError):
                self._folder.rmdir()

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"cannot write {self._path}: {reason}; {STUDY}") from None


def _check_settings(study: optuna.Study, settings: dict[str, Any], path: Path) -> None:
    """Store the settings of a new study; raise `UsageError` if an existing one has others."""
    try:
        known = study.user_attrs.get(ATTRIBUTE)
    except (ValueError, RecursionError):
        known = "?"
    if known is None:
        study.set_user_attr(ATTRIBUTE, settings)
        return
    require(isinstance(known, dict), f"{path} holds a study of another program; {REMEDY}")
    was, now = map(_compared, (known, settings))
    names = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    if names:
        theirs, ours = (json.dumps(each.get(names[0])) for each in (was, now))
        raise UsageError(
            f"{path} holds a study with other settings ({shown(names[0])} is {shown(theirs)} "
            f"there, {ours} here); {REMEDY}"
        )
    try:
        found = Fingerprint.from_json(known[FINGERPRINT])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is damaged: its fingerprint cannot be read; {REMEDY}") from None
    if apart := found.differences(Fingerprint.from_json(settings[FINGERPRINT])):
        raise UsageError(f"{path} holds a study of other content: {joined(apart)}; {REMEDY}")


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must agree beside the fingerprint: options as they are resolved."""
    left_out = (FINGERPRINT, "changed", "set")
    return {name: value for name, value in settings.items() if name not in left_out}


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Raise `UsageError` for a file that is not a study, and for a full disk."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        reason = shown(str(error.__cause__ or error).strip().splitlines()[0])
        raise UsageError(f"cannot use {path}: {reason}; {STUDY}") from error
