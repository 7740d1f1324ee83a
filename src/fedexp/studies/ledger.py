"""The study on the disk: which points have been tried, with what score. Optuna's, in SQLite.

A point of a grid is written in one transaction when it is over, so whatever kills the process, it
is there whole or not at all. Trials of a free search are there while they run; those that a killed
process left are tried again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.data.extras import extra
from fedexp.errors import UsageError, require
from fedexp.studies.grids import Point, Values
from fedexp.studies.trial import Scored

if TYPE_CHECKING:
    import optuna

TERMS = "fedexp"  # the attribute of a study that says what it is a study of
PATIENCE = 10  # rounds before a trial may be given up
STARTUP = 5  # trials before one may be given up


@dataclass(frozen=True)
class Tried:
    """A point and what came out of it."""

    point: Point
    scored: Scored


class Ledger:
    """A study that is open; see `open_ledger`."""

    def __init__(self, study: optuna.Study, values: Values) -> None:
        self._study, self._values = study, values

    def tried(self) -> list[Tried]:
        """Every trial that is over, in the order in which they ended."""
        from optuna.trial import TrialState

        over = self._study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
        return [
            Tried(dict(each.params), Scored(score=each.value, **each.user_attrs[TERMS]))
            for each in over
            if each.value is not None
        ]

    def add(self, point: Point, scored: Scored) -> None:
        """A point of a grid is over."""
        import optuna

        kinds: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(values)
            for name, values in self._values.items()
        }
        self._study.add_trial(
            optuna.create_trial(
                params=point,
                distributions=kinds,
                value=scored.score,
                user_attrs={TERMS: _details(scored)},
            )
        )

    def again(self) -> None:
        """Queue what a killed process left: it is asked for first."""
        from optuna.trial import TrialState

        for left in self._study.get_trials(states=(TrialState.RUNNING,)):
            self._study.tell(left.number, state=TrialState.FAIL)
            self._study.enqueue_trial(left.params)

    def suggest(self, point: Point) -> None:
        """A point to try first, unless there is any already."""
        if not self._study.get_trials():
            self._study.enqueue_trial(point)

    def ask(self) -> tuple[optuna.Trial, Point]:
        """The next point of a free search; `values` are its ranges."""
        trial = self._study.ask()
        point = {
            name: trial.suggest_float(name, low, high, log=True)
            for name, (low, high) in self._values.items()
        }
        return trial, point

    def tell(self, trial: optuna.Trial, scored: Scored) -> None:
        """A trial of a free search is over."""
        from optuna.trial import TrialState

        trial.set_user_attr(TERMS, _details(scored))
        if scored.pruned:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, scored.score)


def _details(scored: Scored) -> dict[str, Any]:
    """All but the score: the study has it, and JSON cannot hold it where it is infinite."""
    return {name: value for name, value in asdict(scored).items() if name != "score"}


@contextmanager
def open_ledger(
    path: Path, name: str, terms: Mapping[str, Any], values: Values, higher: bool, seed: int
) -> Iterator[Ledger]:
    """Begin a study or go on with it, alone; refuse one of other terms.

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
    with _alone(path), _told(path):
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        try:
            study = optuna.create_study(
                storage=storage,
                study_name=name,
                direction="maximize" if higher else "minimize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(STARTUP, PATIENCE),
            )
            _check_terms(study, json.loads(json.dumps(terms)), path)
            # Another seed after every trial: one that goes on must not draw the same points again.
            study.sampler = optuna.samplers.TPESampler(seed=seed + 1000 * len(study.trials))
            yield Ledger(study, values)
        finally:
            storage.remove_session()
            storage.engine.dispose()


def _check_terms(study: optuna.Study, terms: dict[str, Any], path: Path) -> None:
    known = study.user_attrs.get(TERMS)
    if known is None:
        study.set_user_attr(TERMS, terms)
        return
    names = [key for key in {**known, **terms} if known.get(key) != terms.get(key)]
    if names:
        was, now = (json.dumps(each.get(names[0])) for each in (known, terms))
        raise UsageError(
            f"{path} holds a study of other terms ({names[0]} is {was} there, {now} here); choose "
            "another --study, or delete it"
        )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the study; the operating system lets go of it when the process ends, however it does."""
    require(not path.is_dir(), f"{path} is a folder; name a file with --study")
    fcntl = extra("fcntl", "keeping a study alone", "a system with file locks", group="tune")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("ab")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another --study") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is working on {path}; wait for it") from None
        yield


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """A file that is no study, or a full disk, in one line."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UsageError(f"cannot use {path}: {reason}; choose another --study") from error
