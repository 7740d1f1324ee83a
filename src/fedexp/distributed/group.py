"""`Ranks`: the processes of one job, as torchrun starts them, and what they say to each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fedexp.errors import FedExPError, UsageError, require

T = TypeVar("T")

FORCED = "FEDEXP_FORCE_RANKS"  # not empty: even a single rank sends its sums to itself
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# A rank that dies is noticed at once, by its connections and by torchrun; only one that is stuck
# is waited for. Between rounds, ranks may wait for one that has other work.
JOINING, SLOW_ROUND, LONG_WORK = timedelta(minutes=15), timedelta(hours=1), timedelta(days=7)


class RankLostError(FedExPError):
    """Another rank has ended, so that this one cannot go on."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of a job and this process among them. All of them make the same calls.

    Attributes:
        rank: this process, counted from 0.
        world: how many there are.
        local_rank: this process among those of its machine.
        device: where it trains if it is asked for a GPU: its own, or the CPU where it has none.
        store: a few words under names, which outlive a rank that ends.
        talk: the group for objects and for waiting.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    store: Any = field(repr=False)
    talk: Any = field(repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of everyone's tensor, the same bits on every rank; it is written to `tensor`."""
        _asked(lambda: torch.distributed.all_reduce(tensor))
        return tensor

    def rows(self, tensor: Tensor) -> list[Tensor]:
        """Everyone's tensor, by rank; all of one shape and type."""
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        _asked(lambda: torch.distributed.all_gather(found, tensor))
        return found

    def gather(self, value: T) -> list[T]:
        """Everyone's value, by rank, on every rank; anything that can be pickled."""
        found: list[Any] = [None] * self.world
        _asked(lambda: torch.distributed.all_gather_object(found, value, group=self.talk))
        return found

    def broadcast(self, value: T) -> T:
        """The first rank's value, on every rank; what others pass is not looked at."""
        held: list[Any] = [value if self.is_first else None]
        _asked(lambda: torch.distributed.broadcast_object_list(held, src=0, group=self.talk))
        return value if self.is_first else held[0]

    def first(self, compute: Callable[[], T]) -> T:
        """What the first rank computes, on every rank; or the `FedExPError` that it meets."""
        found: T | FedExPError | None = None
        if self.is_first:
            try:
                found = compute()
            except FedExPError as error:
                found = error
        found = self.broadcast(found)
        if isinstance(found, FedExPError):
            raise found
        return cast(T, found)

    def receive(self) -> Any:
        """What the first rank passes to `broadcast`; for the others."""
        return self.broadcast(None)

    def barrier(self) -> None:
        """Wait until all ranks are here, for as long as they need; a signal is heard meanwhile."""
        here = torch.zeros(1)
        waiting = _asked(lambda: torch.distributed.all_reduce(here, group=self.talk, async_op=True))
        pause = 1e-4
        while not waiting.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        _asked(waiting.wait)


def launched() -> tuple[int, int] | None:
    """This rank and the number of ranks, where torchrun has started more than one process."""
    if not all(os.environ.get(name) for name in VARIABLES):
        return None
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        raise UsageError("RANK and WORLD_SIZE must be numbers; start with torchrun") from None
    return (rank, world) if world > 1 or os.environ.get(FORCED) else None


@cache
def ranks() -> Ranks | None:
    """The ranks of this job, which find each other at the first call; None for a lone process.

    What takes part in a job is told by whoever reads the command line: processes that a rank starts
    inherit its environment, and must not ask.
    """
    here = launched()
    if here is None:
        return None
    rank, world = here
    local = int(os.environ["LOCAL_RANK"])
    has_gpu = torch.cuda.is_available() and local < torch.cuda.device_count()
    if has_gpu:
        torch.cuda.set_device(local)  # so that "cuda" means this one
    device = torch.device("cuda", local) if has_gpu else torch.device("cpu")
    try:
        store, talk = _asked(lambda: _joined(rank, world))
    except RankLostError as error:
        raise UsageError(
            f"rank {rank} cannot reach the others ({error}); check the addresses that torchrun was "
            "given, and set GLOO_SOCKET_IFNAME where a machine has several networks"
        ) from None
    _share_cores()
    return Ranks(rank, world, local, device, store, talk)


def current() -> Ranks | None:
    """The ranks of this job if they have found each other already."""
    return ranks() if ranks.cache_info().currsize else None


def leave() -> None:
    """Part from the other ranks; the end of a job that went well."""
    if current() is not None:
        torch.distributed.destroy_process_group()
    ranks.cache_clear()


def check_device(device: str | None) -> None:
    """Refuse a device that not every rank has to itself."""
    kind, _, number = (device or "cpu").partition(":")
    if kind != "cuda":
        return
    require(not number, f"each rank has a GPU of its own; say --device cuda, not {device}")
    gpus, here = torch.cuda.device_count(), neighbours()
    require(
        here <= gpus or not gpus,  # that there is none is told where there are no ranks, too
        f"this machine has {gpus} GPUs for {here} ranks; start torchrun with --nproc-per-node "
        f"{gpus}, or use --device cpu",
    )


def _joined(rank: int, world: int) -> tuple[Any, Any]:
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    words, _, _ = next(iter(rendezvous("env://", timeout=JOINING)))
    # where torchrun starts all ranks again, it may keep the store, with the old ones' addresses
    store: Any = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", words)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=SLOW_ROUND,
    )
    talk = torch.distributed.new_group(backend="gloo", timeout=LONG_WORK)
    return store.clone(), talk  # a connection of our own: NCCL waits for others on that one


def neighbours() -> int:
    """How many ranks share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _share_cores() -> None:
    """Ranks of one machine share its cores, unless somebody has decided otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // neighbours()))


def _asked(collective: Callable[[], T]) -> T:
    """Every rank takes part or none can: whatever goes wrong here is another rank's end."""
    try:
        return collective()
    except (RuntimeError, ConnectionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RankLostError(reason) from error
