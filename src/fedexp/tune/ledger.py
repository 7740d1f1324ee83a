"""Who works on what, among processes that share a study: locks beside its file.

They are locks of the operating system, which lets go of them when their holder ends, however it
does: so what a killed process had begun is free at once for the others. On a disk that several
machines share they hold between machines, if the disk has file locks at all.

The study on the disk: which points have been tried, with what score. Optuna's, in SQLite.

Any number of processes can work on a study. Each holds it for the moment in which it takes a trial
or writes down a score, and claims the trials that it runs, so none is run twice.

A point of a grid is written in one transaction when it is over, so whatever kills the process, it
is there whole or not at all. Trials of a free search are there while they run; those that a killed
process left are tried again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedexp.errors import UsageError, require, shown
from fedexp.optional import extra
from fedexp.runs import RunWarning
from fedexp.runs.fingerprint import Fingerprint, joined
from fedexp.tune.grids import Point, Values
from fedexp.tune.trial import Scored

if TYPE_CHECKING:
    import optuna


class Claims:
    """The trials that this process has taken of a study.

    Claims are taken and given back while the study is held, so no two processes can believe that
    they have the same one.

    Args:
        path: the file of the study; it can hold several.
    """

    def __init__(self, path: Path) -> None:
        require(not path.is_dir(), f"{path} is a folder; name a file with --study")
        self._path, self._folder = path, path.with_name(f".{path.name}.claims")
        self._mine: dict[str, IO[bytes]] = {}
        self._held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the study to oneself for a moment; waits for whoever has it. May be nested."""
        if self._held:
            yield
            return
        with self._told():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = _locked(self._path.with_name(f".{self._path.name}.lock"), wait=True)
        with lock:
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def take(self, name: str) -> bool:
        """Whether the trial is this process's now; not if a process has it, be it this one."""
        with self._told():
            self._folder.mkdir(exist_ok=True)
            try:
                self._mine[name] = _locked(self._folder / name, wait=False)
            except BlockingIOError:
                return False
        return True

    def release(self, name: str) -> None:
        """Give a trial back, done or not."""
        with self._told():
            (self._folder / name).unlink(missing_ok=True)
        self._mine.pop(name).close()

    def close(self) -> None:
        """Give back what is left, and leave no folder behind if nobody else needs it."""
        with self.held():
            for name in list(self._mine):
                self.release(name)
            with suppress(OSError):
                self._folder.rmdir()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"cannot write {self._path}: {reason}; choose another --study"
            ) from None


def _locked(path: Path, wait: bool) -> IO[bytes]:
    """The file, locked; `BlockingIOError` where another holds it and is not to be waited for."""
    fcntl: Any = extra("fcntl", "keeping a study", "a system with file locks", group="tune")
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file


TERMS = "fedexp"  # the attribute of a study that says what it is a study of
FINGERPRINT = "fingerprint"  # what the terms call the content that trials are made from
REMEDY = "choose another --study, or delete it"
PATIENCE = 10  # rounds before a trial may be given up
STARTUP = 5  # trials before one may be given up


@dataclass(frozen=True)
class Tried:
    """A point and what came out of it."""

    point: Point
    scored: Scored


class Ledger:
    """A study that is open; see `open_ledger`. What is done in `held` is done at once."""

    def __init__(
        self, study: optuna.Study, values: Values, seed: int, claims: Claims, path: Path
    ) -> None:
        self._study, self._values, self._seed, self._path = study, values, seed, path
        self._claims, self.held = claims, claims.held

    def tried(self) -> list[Tried]:
        """Every trial that is over, in the order in which they began."""
        from optuna.trial import TrialState

        try:
            with self.held():
                over = self._study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
            return [
                Tried(dict(each.params), _scored(each.value, each.user_attrs[TERMS]))
                for each in over
                if each.value is not None
            ]
        # What somebody else has written there makes Optuna raise these, and us.
        except (LookupError, TypeError, ValueError, RecursionError, OverflowError) as error:
            raise UsageError(
                f"{self._path} holds trials that are none ({shown(error)}); choose another --study"
            ) from error

    def claim(self, number: int) -> bool:
        """Whether a trial is this process's to run from now on; not if somebody runs it."""
        with self.held():
            return self._claims.take(self._name(number))

    def add(self, number: int, point: Point, scored: Scored) -> None:
        """A point of a grid is over, the one that was claimed as `number`."""
        import optuna

        kinds: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(values)
            for name, values in self._values.items()
        }
        trial = optuna.create_trial(
            params=point,
            distributions=kinds,
            value=scored.score,
            user_attrs={TERMS: _details(scored)},
        )
        with self.held():
            self._study.add_trial(trial)
            self._release(number)

    def begun(self) -> int:
        """How many trials of a free search are over or at work.

        What a killed process left is queued again: it is asked for first.
        """
        from optuna.trial import TrialState

        with self.held():
            running = self._study.get_trials(states=(TrialState.RUNNING,))
            left = [each for each in running if self.claim(each.number)]
            for each in left:
                self._study.tell(each.number, state=TrialState.FAIL)
                self._study.enqueue_trial(each.params)
                self._release(each.number)
            return len(self.tried()) + len(running) - len(left)

    def ask(self, first: Point) -> tuple[optuna.Trial, Point]:
        """The next point of a free search, claimed; `values` are its ranges, `first` begins it."""
        import optuna

        with self.held():
            known = len(self._study.get_trials())
            if not known:
                self._study.enqueue_trial(first)
            # Another seed for every trial, so that no process draws the points of another again.
            self._study.sampler = optuna.samplers.TPESampler(seed=self._seed + 1000 * known)
            trial = self._study.ask()
            self.claim(trial.number)
            return trial, {
                name: trial.suggest_float(name, low, high, log=True)
                for name, (low, high) in self._values.items()
            }

    def is_behind(self, trial: optuna.Trial, value: float, round: int) -> bool:
        """Write down how far a trial of a free search is; whether the others were better there."""
        with self.held():
            trial.report(value, round)
            return trial.should_prune()

    def tell(self, trial: optuna.Trial, scored: Scored) -> None:
        """A trial of a free search is over."""
        from optuna.trial import TrialState

        with self.held():
            trial.set_user_attr(TERMS, _details(scored))
            if scored.pruned:
                self._study.tell(trial, state=TrialState.PRUNED)
            else:
                self._study.tell(trial, scored.score)
            self._release(trial.number)

    def _release(self, number: int) -> None:
        self._claims.release(self._name(number))

    def _name(self, number: int) -> str:
        return f"{self._study.study_name} {number}".replace(" ", "-")


def _scored(score: float, details: Mapping[str, Any]) -> Scored:
    """What came out of a trial; raises `TypeError` for details that are none."""
    scored = Scored(score=score, **details)
    numbers = (scored.score, scored.diverged_at, scored.test, scored.step)
    kinds = (isinstance(each, int | float | None) for each in numbers)
    if not all(kinds) or not all(isinstance(b, bool) for b in (scored.pruned, scored.averages)):
        raise TypeError("a score is no number")
    return scored


def _details(scored: Scored) -> dict[str, Any]:
    """All but the score: the study has it, and JSON cannot hold it where it is infinite."""
    return {name: value for name, value in asdict(scored).items() if name != "score"}


@contextmanager
def open_ledger(
    path: Path, name: str, terms: Mapping[str, Any], values: Values, higher: bool, seed: int
) -> Iterator[Ledger]:
    """Begin a study or go on with it; refuse one of other terms.

    Args:
        path: the SQLite file; it can hold several studies.
        name: of the study.
        terms: all that decides its scores.
        values: what is searched.
        higher: whether larger scores are better.
        seed: of a free search.
    """
    optuna = extra("optuna", "tuning", group="tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _told(path), closing(Claims(path)) as claims:
        with claims.held():
            storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        try:
            with claims.held():
                study = optuna.create_study(
                    storage=storage,
                    study_name=name,
                    direction="maximize" if higher else "minimize",
                    load_if_exists=True,
                    pruner=optuna.pruners.MedianPruner(STARTUP, PATIENCE),
                )
                _check_terms(study, json.loads(json.dumps(terms)), path)
            yield Ledger(study, values, seed, claims, path)
        finally:
            storage.remove_session()
            storage.engine.dispose()


def _check_terms(study: optuna.Study, terms: dict[str, Any], path: Path) -> None:
    try:
        known = study.user_attrs.get(TERMS)
    except (ValueError, RecursionError):
        known = "?"
    if known is None:
        study.set_user_attr(TERMS, terms)
        return
    require(isinstance(known, dict), f"{path} holds no study of ours; choose another --study")
    content = known.get(FINGERPRINT)
    was, now = (_compared(each, with_typed=content is None) for each in (known, terms))
    names = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    if names:
        theirs, ours = (json.dumps(each.get(names[0])) for each in (was, now))
        raise UsageError(
            f"{path} holds a study of other terms ({shown(names[0])} is {shown(theirs)} there, "
            f"{ours} here); {REMEDY}"
        )
    if content is None:
        warnings.warn(
            f"{path} holds a study that was begun before studies had fingerprints: whether its "
            f"data, model and code are today's is not known; {REMEDY}",
            RunWarning,
            stacklevel=2,
        )
        return
    try:
        found = Fingerprint.from_json(content)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is damaged: it has no fingerprint to read; {REMEDY}") from None
    if apart := found.differences(Fingerprint.from_json(terms[FINGERPRINT])):
        raise UsageError(f"{path} holds a study of other content: {joined(apart)}; {REMEDY}")


def _compared(terms: Mapping[str, Any], with_typed: bool) -> dict[str, Any]:
    """What must agree beside the content; options as they were typed only where an older version
    resolved no others."""
    left_out = {FINGERPRINT, "changed", "arguments" if with_typed else "set"}
    return {name: value for name, value in terms.items() if name not in left_out}


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """A file that is no study, or a full disk, in one line."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        reason = shown(str(error.__cause__ or error).strip().splitlines()[0])
        raise UsageError(f"cannot use {path}: {reason}; choose another --study") from error
