"""Runs `fedexp` commands on forked ranks, one after another, so that torch is imported once.

launch.py JOBS    a JSON list of [ranks, fault, command...]; a fault is RANK:KIND, an error that
                  this rank alone meets in its third round, memory or bug; RANK:lost, a rank that
                  is killed while the others wait for their GPUs; RANK:WORD, which this rank's
                  command has besides; or nothing
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedexp.cli.main import main
from fedexp.distributed import Ranks, failure, leave, ranks, sharding
from fedexp.distributed.group import FORCED

SEPARATOR = "-- next --"
FAULTS: dict[str, Exception] = {"memory": MemoryError(), "bug": ValueError("something is wrong")}


def on_ranks(world: int, work: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Do work on so many forked ranks; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=as_rank, args=(rank, world, port, work, arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def as_rank(rank: int, world: int, port: int, work: Callable[..., None], arguments: Any) -> None:
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), FORCED: "1"}
    torch.set_num_threads(1)
    work(*arguments)


def joined(work: Callable[[Ranks], None]) -> None:
    """Work of a rank that knows the others, and waits for them at its end."""
    among = ranks()
    assert among is not None
    work(among)
    among.barrier()
    leave()


def command(fault: str, words: list[str]) -> None:
    rank, _, kind = fault.partition(":")
    if kind == "lost":
        vars(failure)["GRACE"] = 1.0
        in_third_round(end_as_torchrun_would if rank == os.environ["RANK"] else wait_for_ever)
    elif rank == os.environ["RANK"] and kind in FAULTS:
        in_third_round(partial(throw, FAULTS[kind]))
    elif rank == os.environ["RANK"]:
        words = [*words, kind]
    sys.exit(main(words))


def throw(error: Exception) -> None:
    raise error


def end_as_torchrun_would() -> None:
    """Die; torchrun asks the others to end, too."""
    parent = os.getppid()
    siblings = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for sibling in set(map(int, siblings)) - {os.getpid()}:
        os.kill(sibling, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever() -> None:
    """As for a GPU that waits for a rank that is gone: no handler of a signal is run."""
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):  # whoever holds it does not get it again
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


def in_third_round(happen: Callable[[], None]) -> None:
    whole = vars(sharding)["shards"]

    def faulty(work: Any, world: int) -> Any:
        if work.round == 3:
            happen()
        return whole(work, world)

    vars(sharding)["shards"] = faulty


if __name__ == "__main__":
    for world, fault, *words in json.loads(sys.argv[1]):
        print(on_ranks(world, command, fault, words), flush=True)
        print(SEPARATOR, file=sys.stderr, flush=True)
