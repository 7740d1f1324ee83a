"""Many processes, one run: the cohort is shared out, and sums are joined by one all-reduce.

Nothing else in the package knows about ranks.
"""

from fedexp.distributed.group import (
    RankLostError,
    Ranks,
    check_device,
    current,
    launched,
    leave,
    ranks,
)
from fedexp.distributed.sharding import Shared

__all__ = [
    "RankLostError",
    "Ranks",
    "Shared",
    "check_device",
    "current",
    "launched",
    "leave",
    "ranks",
]
