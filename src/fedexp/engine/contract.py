"""The contract of rules: what an algorithm's rules return, probed once before the first round.

Types and shapes cannot change later, so rounds check only what can: writes to the arguments
(`model_step`) and the range of the model (`check_range`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.algorithms import Algorithm
from fedexp.client import Tensors, zero_extras
from fedexp.clipping import split_medians
from fedexp.engine.client_store import shapes_of
from fedexp.engine.state import Record, SimulationState
from fedexp.errors import require
from fedexp.seeding import preserved_draws

# Names that a server rule cannot report; its step size is the field `server_lr`.
RECORD_FIELDS = frozenset(field.name for field in fields(Record)) - {"server_lr"}


class Contract(NamedTuple):
    """What the rules of an algorithm return for a model.

    Attributes:
        client_state: the state of a client before its first round.
        bytes_up: bytes that a client sends in a round: parameters, averaged buffers, extras.
        bytes_down: bytes that it receives: parameters, all buffers, the broadcast state.
    """

    client_state: Tensors
    bytes_up: int
    bytes_down: int


def probe(algorithm: Algorithm, state: SimulationState) -> Contract:
    """Call every rule once; raise `UsageError` where one returns what a round cannot use.

    Client rules get a zero update, the server rule one of ones. All get copies of the tensors of
    the state, and torch's generators are left as they were.
    """
    rule, params = algorithm.client, state.params.clone()
    client, server = (type(side).__name__ for side in (rule, algorithm.server))
    with preserved_draws():
        client_state = rule.init_client_state(params)
        _check_state(f"init_client_state of {client}", client_state)
        _check_state(f"init_broadcast of {client}", state.broadcast)
        _check_state(f"init of {server}", state.server)
        of_rule, _ = split_medians(state.server)
        broadcast, before = (
            {name: value.clone() for name, value in tensors.items()}
            for tensors in (state.broadcast, of_rule)
        )
        zero = torch.zeros_like(params)
        grad = rule.correct(zero.clone(), params, params.clone(), broadcast, client_state)
        _check_client(client, grad, rule.end_round(zero, 1.0, broadcast, client_state), params)
        extras = zero_extras(rule, params)
        sums = {name: value[None] for name, value in extras.items()}
        aggregate = Aggregate.of(torch.ones_like(params)[None], None, sums)
        stepped = algorithm.server.step(params.clone(), aggregate, before)
        _check_step(f"step of {server}", stepped, params, of_rule)
    up = (params, state.buffers.averaged, *extras.values())
    down = (params, *state.buffers, *broadcast.values())
    return Contract(client_state, *(sum(t.nbytes for t in sent) for sent in (up, down)))


def _check_state(method: str, value: Any) -> None:
    """Refuse a state that is not a dict of tensors."""
    require(
        isinstance(value, Mapping) and all(isinstance(t, Tensor) for t in value.values()),
        f"{method} returns {type(value).__name__} as state; return tensors by name, e.g. "
        '{"momentum": torch.zeros_like(params)}, or {} for none',
    )


def _check_client(rule: str, grad: Any, ended: Any, params: Tensor) -> None:
    """Refuse what local training cannot use."""
    require(
        isinstance(grad, Tensor) and grad.shape == params.shape,
        f"correct of {rule} returns {_shown(grad)}; return the corrected gradient, of shape "
        f"{list(params.shape)}",
    )
    require(
        isinstance(ended, tuple) and len(ended) == 2 and all(isinstance(v, Mapping) for v in ended),
        f"end_round of {rule} returns {type(ended).__name__}; return two dicts of tensors: the "
        "client state, and what is summed over clients",
    )
    for name, value in ended[1].items():
        require(
            isinstance(value, Tensor) and value.ndim > 0,
            f"end_round of {rule} sums {name!r}, which is not a vector; return a tensor of one "
            "dimension, e.g. value[None]",
        )


def _check_step(step: str, stepped: Any, before: Tensor, initial: Tensors) -> None:
    """Refuse what the next round cannot start from, or a record cannot hold."""
    require(
        isinstance(stepped, tuple) and len(stepped) == 3,
        f"{step} returns {type(stepped).__name__}; return the next parameters, the next state and "
        "a dict of metrics",
    )
    params, state, metrics = stepped
    require(
        _shown(params) == _shown(before),
        f"{step} returns {_shown(params)} as parameters, not {_shown(before)}; return all of them "
        "as one vector, as params.dtype",
    )
    _check_state(step, state)
    # a run whose state has other shapes than the initial one could not be resumed
    changed = sorted({name for name, _ in shapes_of(state) ^ shapes_of(initial)})
    require(
        not changed,
        f"{step} returns a state whose {', '.join(changed)} differs from that of init; give init "
        'the same names and shapes, e.g. return {"momentum": torch.zeros_like(params)}',
    )
    require(
        isinstance(metrics, Mapping),
        f"{step} returns {_shown(metrics)} as metrics; return numbers by name, {{}} for none",
    )
    for name, value in metrics.items():
        require(
            value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real),
            f"{step} reports {name} as {_shown(value)}; report one number, e.g. its mean",
        )
        require(
            name not in RECORD_FIELDS,
            f"{step} reports a metric called {name}, which every record has; give it another name",
        )


def _shown(value: Any) -> str:
    """Return the shape and the type of a tensor, or the type of anything else."""
    is_tensor = isinstance(value, Tensor)
    return f"{list(value.shape)} of {value.dtype}" if is_tensor else type(value).__name__
