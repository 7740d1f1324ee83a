"""Run `fedexp` commands on forked ranks, one job after another, so that torch is imported once.

launch.py JOBS

JOBS is a JSON list of [ranks, fault, command...]. A fault is empty or RANK:KIND:
    RANK:memory, RANK:bug   the rank raises an error in its third round
    RANK:lost               the rank is killed while the others are blocked in C
    RANK:WORD               the rank's command has one more argument, WORD
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from fedexp.cli.main import main
from fedexp.distributed import Ranks, failure, leave, ranks, sharding
from fedexp.distributed.group import FORCED

SEPARATOR = "-- next --"
FAULTS: dict[str, Exception] = {"memory": MemoryError(), "bug": ValueError("something is wrong")}


def on_ranks(world_size: int, work: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Run `work` on forked ranks and return their exit codes; like torchrun, host their store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=as_rank, args=(rank, world_size, store.port, work, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def as_rank(
    rank: int, world_size: int, port: int, work: Callable[..., None], arguments: Any
) -> None:
    """Run `work` with the environment that torchrun gives to a rank."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        FORCED: "1",
    }
    torch.set_num_threads(1)
    work(*arguments)


def joined(work: Callable[[Ranks], None]) -> None:
    """Join the job, run `work`, and wait for the other ranks."""
    job = ranks()
    assert job is not None
    work(job)
    job.barrier()
    leave()


def command(fault: str, words: list[str]) -> None:
    """Run a `fedexp` command with a fault on one rank."""
    rank, _, kind = fault.partition(":")
    if kind == "lost":
        vars(failure)["EXIT_TIMEOUT"] = 1.0
        in_third_round(die_under_torchrun if rank == os.environ["RANK"] else block_for_ever)
    elif rank == os.environ["RANK"] and kind in FAULTS:
        in_third_round(partial(throw, FAULTS[kind]))
    elif rank == os.environ["RANK"]:
        words = [*words, kind]
    sys.exit(main(words))


def throw(error: Exception) -> None:
    raise error


def die_under_torchrun() -> None:
    """Send SIGTERM to the other ranks, as torchrun does when a rank dies, and die."""
    parent = os.getppid()
    siblings = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for sibling in set(map(int, siblings)) - {os.getpid()}:
        os.kill(sibling, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)


def block_for_ever() -> None:
    """Block in C, where no Python signal handler runs, as NCCL does when a rank is lost."""
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):  # the second call waits for the first
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


def in_third_round(happen: Callable[[], None]) -> None:
    original = vars(sharding)["shard_cohort"]

    def faulty(work: Any, world_size: int) -> Any:
        if work.round == 3:
            happen()
        return original(work, world_size)

    vars(sharding)["shard_cohort"] = faulty


if __name__ == "__main__":
    for world_size, fault, *words in json.loads(sys.argv[1]):
        print(on_ranks(world_size, command, fault, words), flush=True)
        print(SEPARATOR, file=sys.stderr, flush=True)
