"""The ranks of a torchrun job: joining the process group, and collectives over it.

`ranks()` joins the job on its first call and returns a `Ranks`: the rank of this process, the world
size, and the collectives that the package uses. Tensors go over NCCL (GPU) or Gloo (CPU), Python
objects always over Gloo. A collective that fails means that another rank has ended: it raises
`RankLostError`.

Ranks find each other through a key-value store. torchrun's agent, the process that starts the
ranks, hosts it: it listens before the first rank starts, so if nobody listens, the agent has ended,
and nobody will terminate its ranks; `ranks()` then raises `AgentLostError`. For ranks that are
started by hand, rank 0 hosts the store.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fedexp.errors import FedExPError, UsageError, first_line, require

T = TypeVar("T")

FORCED = "FEDEXP_FORCE_RANKS"  # if set, a single rank takes the distributed code path, for tests
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Torchrun and closed connections reveal a dead rank at once; timeouts only catch one that is stuck.
# Collectives on objects wait longer: between rounds a rank may have other work.
INIT_TIMEOUT = timedelta(minutes=15)
CONNECT_TIMEOUT = timedelta(seconds=5)  # of one attempt to reach the store of torchrun's agent
AGENT_TIMEOUT = 5.0  # seconds for which the agent's port may refuse connections
TENSOR_TIMEOUT = timedelta(hours=1)
OBJECT_TIMEOUT = timedelta(days=7)


class RankLostError(FedExPError):
    """Another rank has ended, so this one cannot continue."""


class AgentLostError(FedExPError):
    """torchrun's agent ended before its ranks were connected."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """The process group of a job, seen from one rank. All ranks must make the same calls.

    Attributes:
        rank: this process, counted from 0.
        world_size: number of ranks.
        local_rank: this process among the ranks of its machine.
        device: the rank's own GPU, or the CPU if it has none.
        store: the key-value store of the job; it outlives a rank that ends.
        gloo_group: process group for Python objects and barriers.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: Any = field(repr=False)
    gloo_group: Any = field(repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place, and return it; bitwise equal on every rank."""
        _collective(lambda: torch.distributed.all_reduce(tensor))
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank; shapes and dtypes must be equal."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        _collective(lambda: torch.distributed.all_gather(gathered, tensor))
        return gathered

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank; any value that can be pickled."""
        gathered: list[Any] = [None] * self.world_size
        group = self.gloo_group
        _collective(lambda: torch.distributed.all_gather_object(gathered, value, group=group))
        return gathered

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank; the values of other ranks are ignored."""
        values: list[Any] = [value if self.is_first else None]
        group = self.gloo_group
        _collective(lambda: torch.distributed.broadcast_object_list(values, src=0, group=group))
        return value if self.is_first else values[0]

    def receive(self) -> Any:
        """Return the value that rank 0 broadcasts; for the other ranks."""
        return self.broadcast(None)

    def compute_on_first(self, compute: Callable[[], T]) -> T:
        """Return what `compute` returns on rank 0, or raise its `FedExPError`, on every rank."""
        result: T | FedExPError | None = None
        if self.is_first:
            try:
                result = compute()
            except FedExPError as error:
                result = error
        result = self.broadcast(result)
        if isinstance(result, FedExPError):
            raise result
        return cast(T, result)

    def barrier(self) -> None:
        """Wait until all ranks have called this; Python signal handlers run meanwhile."""
        token, group = torch.zeros(1), self.gloo_group
        work = _collective(lambda: torch.distributed.all_reduce(token, group=group, async_op=True))
        pause = 1e-4  # seconds
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        _collective(work.wait)


def ranks() -> Ranks | None:
    """Join the torchrun job and return its ranks; None for a single process.

    The first call connects to the other ranks, later calls return the same object. Subprocesses of
    a rank inherit its environment and must not call this.
    """
    launch = launched()
    return None if launch is None else _join(*launch)


@cache
def _join(rank: int, world_size: int) -> Ranks:
    local_rank = int(os.environ["LOCAL_RANK"])
    has_gpu = torch.cuda.is_available() and local_rank < torch.cuda.device_count()
    if has_gpu:
        torch.cuda.set_device(local_rank)  # so that "cuda" means this one
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    try:
        store, gloo_group = _collective(lambda: _init_process_group(rank, world_size))
    except RankLostError as error:
        check_agent()
        raise UsageError(
            f"rank {rank} cannot reach the other ranks ({error}); check the addresses given to "
            "torchrun, and set GLOO_SOCKET_IFNAME if a machine has several networks"
        ) from None
    if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine divide its cores
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size()))
    return Ranks(rank, world_size, local_rank, device, store, gloo_group)


def _init_process_group(rank: int, world_size: int) -> tuple[Any, Any]:
    """Return the store and the Gloo group of the job."""
    from torch.distributed.distributed_c10d import PrefixStore

    nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    shared = _connect_store()
    # when torchrun restarts all ranks, its store may still hold keys of the previous attempt
    store: Any = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", shared)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=TENSOR_TIMEOUT,
    )
    gloo_group = torch.distributed.new_group(backend="gloo", timeout=OBJECT_TIMEOUT)
    return store.clone(), gloo_group  # a separate connection, as NCCL may block the first one


def _connect_store() -> Any:
    """Return the store of the job; while the agent is alive, retry for `INIT_TIMEOUT`."""
    from torch.distributed.rendezvous import rendezvous

    retry = agent_hosts_store()
    deadline = time.monotonic() + INIT_TIMEOUT.total_seconds()
    while True:
        check_agent()
        try:
            store, _, _ = next(
                iter(rendezvous("env://", timeout=CONNECT_TIMEOUT if retry else INIT_TIMEOUT))
            )
            store.set_timeout(INIT_TIMEOUT)
            return store
        except RuntimeError:
            if not retry or time.monotonic() > deadline:
                raise


def agent_hosts_store() -> bool:
    """Return whether torchrun's agent hosts the store of the job, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def check_agent() -> None:
    """Raise `AgentLostError` if the port of the agent's store refuses connections."""
    if not agent_hosts_store():
        return
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    deadline = time.monotonic() + AGENT_TIMEOUT
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=AGENT_TIMEOUT).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise AgentLostError(
                    f"torchrun does not answer at {host}:{port}: it ended before its ranks were "
                    "connected, or a firewall closes the port; start the same command again"
                ) from None
        except OSError:  # a slow or misconfigured network: torch retries, and names the cause
            return
        time.sleep(0.1)


def current() -> Ranks | None:
    """Return the ranks of this job if `ranks()` has joined it already."""
    return ranks() if _join.cache_info().currsize else None


def leave() -> None:
    """Destroy the process group at the end of a successful job."""
    if current() is not None:
        torch.distributed.destroy_process_group()
    _join.cache_clear()


def launched() -> tuple[int, int] | None:
    """Return (rank, world size) if torchrun started more than one process, else None."""
    if not all(os.environ.get(name) for name in VARIABLES):
        return None
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        raise UsageError("RANK and WORLD_SIZE must be numbers; start with torchrun") from None
    return (rank, world_size) if world_size > 1 or os.environ.get(FORCED) else None


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def check_device(device: str | None) -> None:
    """Refuse a device that the ranks of this machine would have to share."""
    kind, _, number = (device or "cpu").partition(":")
    if kind != "cuda":
        return
    require(not number, f"every rank uses a different GPU; use --device cuda, not {device}")
    gpus, local = torch.cuda.device_count(), local_world_size()
    require(
        local <= gpus or not gpus,  # a machine without GPUs is refused elsewhere
        f"this machine has {gpus} GPUs for {local} ranks; start torchrun with --nproc-per-node "
        f"{gpus}, or use --device cpu",
    )


def _collective(call: Callable[[], T]) -> T:
    """Run a collective; an error in it means that another rank has ended."""
    try:
        return call()
    except (RuntimeError, ConnectionError) as error:
        raise RankLostError(first_line(error)) from error
