"""Distributed runs: each rank trains a shard of the cohort, and one all-reduce adds the sums."""

from typing import Any

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
from fedexp.errors import warn_deprecated

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


def __getattr__(name: str) -> Any:
    if name == "Shared":
        warn_deprecated("fedexp.distributed.Shared", "fedexp.distributed.DistributedGroup")
        return DistributedGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
