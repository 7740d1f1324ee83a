"""Distributed runs: each rank trains a shard of the cohort, and one all-reduce adds the sums."""

from fedexp.distributed.group import (
    AgentLostError,
    RankLostError,
    Ranks,
    check_device,
    current,
    launched,
    leave,
    ranks,
)
from fedexp.distributed.sharding import DistributedGroup

__all__ = [
    "AgentLostError",
    "DistributedGroup",
    "RankLostError",
    "Ranks",
    "check_device",
    "current",
    "launched",
    "leave",
    "ranks",
]
