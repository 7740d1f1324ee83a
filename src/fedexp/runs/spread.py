"""Many runs over the ranks of a job: whole runs where there are enough, else the clients of each.

Whole runs need no word between ranks until all are over, so they come first. Where there are fewer
runs than ranks, all ranks share the cohort of one run after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedexp.distributed import RankLostError, Ranks
from fedexp.experiments.outcome import OnRound, Outcome
from fedexp.experiments.spec import Spec
from fedexp.runs.execute import execute
from fedexp.runs.folder import BusyError
from fedexp.runs.keeping import CHECKPOINT_EVERY, Stopped
from fedexp.runs.pool import OnBusy, run_all, stored
from fedexp.runs.shards import Shard


def run_spread(
    specs: Sequence[Spec],
    ranks: Ranks,
    on_round: OnRound,
    root: Path | None = None,
    *,
    checkpoint_every: float = CHECKPOINT_EVERY,
    stop: Callable[[], bool] = lambda: False,
    on_busy: OnBusy | None = None,
    restart: bool = False,
) -> list[Outcome]:
    """Run the specs, as `run_all` does; every rank calls it, and gets all outcomes.

    What is stored already is for the first rank to say, of a folder that all ranks see. `on_round`
    and `on_busy` are told on each rank of what that rank does.
    """
    found = {} if restart else _over(specs, ranks, root)
    left = [spec for spec in specs if spec not in found]
    keeping: dict[str, Any] = {"checkpoint_every": checkpoint_every, "stop": stop}
    keeping["restart"] = restart
    if len(left) >= ranks.world:
        mine = Shard(ranks.rank + 1, ranks.world).of(left)
        own = run_all(mine, 1, on_round, root, on_busy=on_busy, **keeping)
        found |= {each.spec: each for part in _gathered(own, ranks, stop) for each in part}
    else:
        for spec in left:
            try:
                found[spec] = execute(spec, root, on_round, ranks=ranks, **keeping)
            except BusyError:  # on every rank
                if on_busy is None:
                    raise
                on_busy(spec)
    return [found[spec] for spec in specs if spec in found]


def told_of(runs: int, ranks: Ranks | None) -> int:
    """Of how many runs this rank hears, at most: its share of whole ones, or each that all share.

    >>> told_of(10, None)
    10
    """
    if ranks is None or runs < ranks.world:
        return runs
    return math.ceil(runs / ranks.world)


def _over(specs: Sequence[Spec], ranks: Ranks, root: Path | None) -> dict[Spec, Outcome]:
    """The runs that were over before."""
    found = {}
    if root is not None and ranks.is_first:
        found = {specs[k]: outcome for k, outcome in stored(specs, root, lambda spec, row: None)}
    return ranks.broadcast(found)


def _gathered(
    own: list[Outcome], ranks: Ranks, stop: Callable[[], bool]
) -> Sequence[list[Outcome]]:
    """Everyone's outcomes, when the last rank is ready, which may take long."""
    try:
        ranks.barrier()
    except RankLostError:
        if stop():
            raise Stopped(None, 0) from None  # as the others did
        raise
    return ranks.gather(own)
