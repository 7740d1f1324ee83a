"""Runs `fedexp` commands on forked ranks, one after another, so that torch is imported once.

launch.py JOBS    a JSON list of [ranks, fault, command...]; a fault is RANK:KIND, an error that
                  this rank alone meets in its third round, memory or bug; RANK:WORD, which this
                  rank's command has besides; or nothing
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch

from fedexp.cli.main import main
from fedexp.distributed import shared
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


def command(fault: str, words: list[str]) -> None:
    rank, _, kind = fault.partition(":")
    if rank == os.environ["RANK"] and kind in FAULTS:
        break_third_round(FAULTS[kind])
    elif rank == os.environ["RANK"]:
        words = [*words, kind]
    sys.exit(main(words))


def break_third_round(error: Exception) -> None:
    whole = vars(shared)["shards"]

    def faulty(work: Any, world: int) -> Any:
        if work.round == 3:
            raise error
        return whole(work, world)

    vars(shared)["shards"] = faulty


if __name__ == "__main__":
    for world, fault, *words in json.loads(sys.argv[1]):
        print(on_ranks(world, command, fault, words), flush=True)
        print(SEPARATOR, file=sys.stderr, flush=True)
