"""Server rules, client rules and algorithms that the contract tests cover."""

from __future__ import annotations

import torch
from torch import Tensor

import fedexp as fx

SERVER_RULES = [
    fx.Average(),
    fx.Average(lr=0.3),
    fx.Momentum(),
    fx.Momentum(lr=0.7, nesterov=True),
    fx.ExP(),
    fx.ExP(eps=0.0),
    fx.ExP(eps=0.0, factor=1.0),
    fx.ExP(eps=0.0, clamp=False),
    fx.ExP(max_step=1.5),
    fx.ExP(eps_mode="participants"),
    fx.ExP(eps_mode="relative", eps=0.1),
    fx.ExP(eps_decay=0.9, decay_before_first_round=True),
    fx.MomentumExP(),
    fx.MomentumExP(apply_momentum=False),
    fx.Adagrad(),
    fx.Adagrad(tau=0.0),
    fx.Adagrad(form="printed"),
    fx.Adagrad(form="authors"),
    fx.Adam(),
    fx.Adam(tau=0.0),
    fx.Adam(form="printed"),
    fx.Adam(form="authors"),
    fx.Yogi(),
    fx.Yogi(tau=0.0),
    fx.Yogi(form="printed"),
    fx.AMS(),
    fx.AMS(tau=0.0),
    fx.AMS(tau=1e-3, stabilise="sum"),
    fx.Hypergradient(),
    fx.Hypergradient(lr=0.5, high=2.0),
]
EXTRAPOLATING = [rule for rule in SERVER_RULES if isinstance(rule, fx.ExP)]
CLIENT_RULES: list[fx.ClientRule] = [
    fx.SGD(),
    fx.Prox(0.1),
    fx.Scaffold(),
    fx.ProxEnvelope(0.1),
    fx.Nova(),
]
ALGORITHMS = [
    fx.fedavg(),
    fx.fedexp(),
    fx.fedavgm(),
    fx.diloco(),
    fx.fedexp_m(),
    fx.fedprox(),
    fx.fedprox_exp(),
    fx.scaffold(),
    fx.scaffold_exp(),
    fx.fedadagrad(),
    fx.fedadam(),
    fx.fedyogi(),
    fx.fedams(),
    fx.fedexprox(lr=1.5),
    fx.fedexprox_grads(),
    fx.fedexprox_stops(max_step=4.0),
    fx.fedhyper(),
    fx.fednova(),
]


def rule_id(rule: object) -> str:
    """Return a short id for a parametrised test."""
    return getattr(rule, "name", None) or repr(rule)


def random_updates(
    clients: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return client updates [clients, dim]: a common direction plus noise."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(dim, generator=draw, dtype=torch.float64)
    noise = torch.randn(clients, dim, generator=draw, dtype=torch.float64)
    return (0.3 * common + noise).to(dtype)
