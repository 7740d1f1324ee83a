"""Federated training in plain torch, written from the paper's formulas.

It shares no code with the package: modules, `loss.backward()`, dictionaries of named tensors, sums
in Python. Which rows make a batch, which clients take part and which random numbers layers draw are
arguments, so that a run of the package can be repeated example by example. It is slow and plain on
purpose: the loop engine is tested against it, and all other engines against the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Named = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Callable[[int, int], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Recipe:
    """Local training and the rules of client and server.

    Args:
        lr: local step size, multiplied by `lr_decay` after every round.
        clip: bound on the norm of the corrected gradient, over all trained parameters together.
        decay: weight decay; it is added after clipping.
        client: "sgd" (eq. 2), "prox" (FedProx) or "scaffold" (option II).
        server: "average" (eq. 4) or "exp" (eq. 8).
        weigh: weigh clients by their number of examples.
    """

    lr: float = 0.1
    lr_decay: float = 1.0
    clip: float | None = None
    decay: float = 0.0
    client: Literal["sgd", "prox", "scaffold"] = "sgd"
    mu: float = 0.0
    server: Literal["average", "exp"] = "average"
    server_lr: float = 1.0
    eps: float = 1e-3
    weigh: bool = False


@dataclass(frozen=True)
class Problem:
    """What is trained, on which data, in which order.

    Args:
        worker: a module that all clients train in turn; its values are overwritten.
        loss: of (outputs, y) of a batch; its mean over whatever it returns is minimised.
        clients: the examples `x` and `y` of each client.
        cohorts: the clients of each round.
        batches: the rows of each local step, by round (from 1) and client.
        draws: the block in which a client of a round may draw random numbers.
    """

    worker: nn.Module
    loss: Loss
    clients: Sequence[tuple[Tensor, Tensor]]
    cohorts: Sequence[Sequence[int]]
    batches: Batches
    draws: Callable[[int, int], AbstractContextManager[None]]


@dataclass(frozen=True)
class Outcome:
    """The model after the last round, by name, and the server's step size of each round."""

    params: Named
    buffers: Named
    steps: tuple[float, ...]


def train(problem: Problem, recipe: Recipe) -> Outcome:
    """Run one round per cohort, from the values that the worker has."""
    params, buffers = _trained(problem.worker), _floating(problem.worker)
    fixed = _not_averaged(problem.worker)
    server_control = _zeros(params)
    controls = [_zeros(params) for _ in problem.clients]
    steps: list[float] = []
    for round, cohort in enumerate(problem.cohorts, start=1):
        lr = recipe.lr * recipe.lr_decay ** (round - 1)
        weights = [float(len(problem.clients[i][1])) if recipe.weigh else 1.0 for i in cohort]
        deltas: list[Named] = []
        after: list[Named] = []
        psis: list[Named] = []
        for i in cohort:
            _load(problem.worker, {**params, **buffers, **fixed})
            offset = {n: server_control[n] - controls[i][n] for n in params}
            rows = problem.batches(round, i)
            with problem.draws(round, i):
                for batch in rows:
                    _local_step(problem, recipe, i, batch, lr, params, offset)
            end = _trained(problem.worker)
            deltas.append({n: params[n] - end[n] for n in params})
            after.append(_floating(problem.worker))
            if recipe.client == "scaffold":
                total_lr = len(rows) * lr
                psi = {n: server_control[n] - deltas[-1][n] / total_lr for n in params}
                controls[i] = {n: controls[i][n] - psi[n] for n in params}
                psis.append(psi)
        mean = _mean(deltas, weights)
        eta = _server_lr(recipe, deltas, weights, mean)
        params = {n: params[n] - eta * mean[n] for n in params}
        buffers = _mean(after, weights)
        if psis:
            everyone = [float(len(y)) if recipe.weigh else 1.0 for _, y in problem.clients]
            share = sum(weights) / sum(everyone)
            average = _mean(psis, weights)
            server_control = {n: server_control[n] - share * average[n] for n in params}
        steps.append(eta)
    return Outcome(params, buffers, tuple(steps))


def _local_step(
    problem: Problem,
    recipe: Recipe,
    client: int,
    rows: Sequence[int],
    lr: float,
    start: Named,
    offset: Named,
) -> None:
    """w ← w - η (clip(g + μ (w - w⁰) + c - c_i) + λ w), in the worker."""
    x, y = problem.clients[client]
    picked = torch.as_tensor(rows)
    module = problem.worker
    module.train()
    module.zero_grad(set_to_none=True)
    problem.loss(module(x[picked]), y[picked]).mean().backward()
    with torch.no_grad():
        grads: Named = {}
        weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        for name, weight in weights.items():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            if recipe.client == "prox":
                grad += recipe.mu * (weight - start[name])
            if recipe.client == "scaffold":
                grad += offset[name]
            grads[name] = grad
        norm = _sq_norm(grads) ** 0.5
        factor = 1.0
        if recipe.clip is not None and norm > recipe.clip:
            factor = recipe.clip / norm
        for name, weight in weights.items():
            weight.sub_(lr * (factor * grads[name] + recipe.decay * weight))


def _server_lr(
    recipe: Recipe, deltas: Sequence[Named], weights: Sequence[float], mean: Named
) -> float:
    """η_g: constant, or max(1, Σ p ||Δ||² / (2 Σ p (||Δ̄||² + ε)))."""
    if recipe.server == "average":
        return recipe.server_lr
    spread = sum(p * _sq_norm(d) for p, d in zip(weights, deltas, strict=True)) / sum(weights)
    return max(1.0, spread / (2 * (_sq_norm(mean) + recipe.eps)))


def _sq_norm(named: Named) -> float:
    return sum(float(value.double().pow(2).sum()) for value in named.values())


def _mean(each: Sequence[Named], weights: Sequence[float]) -> Named:
    total = sum(weights)
    means: Named = {}
    for name, first in each[0].items():
        value = torch.zeros_like(first)  # not 0 * first: a mask may hold infinities
        for p, one in zip(weights, each, strict=True):
            value += p / total * one[name]
        means[name] = value
    return means


def _zeros(named: Named) -> Named:
    return {name: torch.zeros_like(value) for name, value in named.items()}


def _trained(module: nn.Module) -> Named:
    """Copies of the parameters that are trained; a tied one has one name."""
    return {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}


def _floating(module: nn.Module) -> Named:
    """Copies of the buffers that are averaged over clients."""
    return {n: b.detach().clone() for n, b in module.named_buffers() if b.is_floating_point()}


def _not_averaged(module: nn.Module) -> Named:
    """Copies of all other buffers: every client starts from those of the initial model."""
    return {n: b.detach().clone() for n, b in module.named_buffers() if not b.is_floating_point()}


def _load(module: nn.Module, values: Named) -> None:
    """Write values into a module where they are, so that whatever refers to them sees them."""
    with torch.no_grad():
        for name, target in (*module.named_parameters(), *module.named_buffers()):
            if name in values:
                target.copy_(values[name])
