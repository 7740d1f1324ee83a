"""Trials over the ranks of a job: whole trials where there are enough, else the clients of each.

Ranks share a study as any processes do, through its file. Where fewer trials are left than there
are ranks, the first rank alone decides, and all share the cohort of one trial after another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fedexp.distributed import Ranks
from fedexp.experiments.spec import Spec
from fedexp.studies.trial import Row, Scored, run_trial
from fedexp.studies.workers import Pause, Search, run_trials


def run_left(search: Search, left: int, jobs: int, pause: Pause, ranks: Ranks | None) -> None:
    """Run the trials that are left, as many as that at the same time as can be.

    Args:
        search: what decides which trials are run; each rank has its own of the same study.
        left: how many there are, the same number on all ranks.
        jobs: trials at a time where there are no ranks.
        pause: called again and again while other processes have all that is left.
        ranks: the processes that all call this, if there are several.
    """
    if ranks is None:
        run_trials(search, min(jobs, left), pause)
    elif left >= ranks.world:
        run_trials(search, 1, pause)
    elif ranks.is_first:
        run_trials(search, 1, pause, partial(_lead, ranks))
        ranks.broadcast(None)
    else:
        _follow(ranks)


def _lead(ranks: Ranks, spec: Spec, go_on: Callable[[Row], bool]) -> Scored:
    """A trial with all ranks; they hear which one, and after every round whether it goes on."""
    ranks.broadcast(spec)
    return run_trial(spec, lambda row: ranks.broadcast(go_on(row)), ranks)


def _follow(ranks: Ranks) -> None:
    while (spec := ranks.receive()) is not None:
        run_trial(spec, lambda row: bool(ranks.receive()), ranks)
