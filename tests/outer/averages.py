"""What `OuterOptimizer.all_reduce` leaves on each of four workers, which are forked.

python -m tests.outer.averages FILE

FILE.RANK gets, by case, the gradients, the metrics and the weights after the step of this rank.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fedexp as fx
from fedexp.outer import OuterOptimizer
from tests.distributed.launch import on_ranks

WORKERS = 4
CASES = ("all", "one is not finite", "none is finite", "a group of two", "bfloat16")
RULE = fx.ExP(eps=0.01, eps_mode="participants")


def gradients(rank: int, case: str) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    grads = [torch.randn(3, 2, generator=draw), torch.randn(5, generator=draw)]
    if (case == "one is not finite" and rank == 1) or case == "none is finite":
        grads[1][rank] = torch.nan
    return [grad.to(torch.bfloat16) for grad in grads] if case == "bfloat16" else grads


def result(rank: int, case: str) -> dict[str, Any]:
    grads = gradients(rank, case)
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    outer = OuterOptimizer(params, RULE)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    group = dist.new_group([0, 1]) if case == "a group of two" else None
    if group is not None and rank > 1:
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outer.all_reduce(group)
    found: dict[str, Any] = {"grads": [param.grad for param in params]}
    found["warnings"] = [str(each.message) for each in caught]
    try:
        outer.step()
    except fx.FedExPError as error:
        found["error"] = str(error)
    return {**found, "metrics": outer.metrics, "params": [param.detach() for param in params]}


def work(path: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.save({case: result(rank, case) for case in CASES}, f"{path}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    assert on_ranks(WORKERS, work, sys.argv[1]) == [0] * WORKERS
