"""Ranks as forks of one process, so that torch is imported once."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable

import torch

from fedexp.distributed import Ranks, leave, ranks


def in_ranks(world: int, work: Callable[[Ranks], None]) -> None:
    """Let every rank do its work; all of them must end well."""
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_rank, args=(rank, world, port, work)) for rank in range(world)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * world


def _rank(rank: int, world: int, port: int, work: Callable[[Ranks], None]) -> None:
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    among = ranks()
    assert among is not None
    work(among)
    among.barrier()
    leave()
