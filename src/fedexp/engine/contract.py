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
from fedexp.engine.client_store import shapes_of
from fedexp.engine.state import Record, SimulationState
from fedexp.errors import require
from fedexp.seeding import preserved_draws

# Names that a server rule cannot report; its step size is the field `server_lr`.
RECORD_FIELDS = frozenset(field.name for field in fields(Record)) - {"server_lr"}
NAMED = 'return tensors by name, e.g. {"momentum": torch.zeros_like(params)}'


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
    with preserved_draws():
        client_state = rule.init_client_state(params)
        _check_named(rule, "init_client_state", client_state)
        _check_named(rule, "init_broadcast", state.broadcast)
        _check_named(algorithm.server, "init", state.server)
        broadcast = {name: value.clone() for name, value in state.broadcast.items()}
        zero = torch.zeros_like(params)
        corrected = rule.correct(zero.clone(), params, params.clone(), broadcast, client_state)
        ended = rule.end_round(zero, 1.0, broadcast, client_state)
        _check_client(type(rule).__name__, corrected, ended, params)
        extras = zero_extras(rule, params)
        sums = {name: value[None] for name, value in extras.items()}
        aggregate = Aggregate.of(torch.ones_like(params)[None], None, sums)
        server = {name: value.clone() for name, value in state.server.items()}
        stepped = algorithm.server.step(params.clone(), aggregate, server)
        _check_step(f"step of {type(algorithm.server).__name__}", stepped, params, state.server)
    up = (params, state.buffers.averaged, *extras.values())
    down = (params, *state.buffers, *broadcast.values())
    return Contract(client_state, *(sum(t.nbytes for t in sent) for sent in (up, down)))


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(t, Tensor) for t in value.values())


def _check_named(rule: object, method: str, value: Any) -> None:
    """Refuse a state that is not a dict of tensors."""
    kind = type(value).__name__
    require(_is_named(value), f"{method} of {type(rule).__name__} returns {kind}; {NAMED}")


def _check_client(rule: str, corrected: Any, ended: Any, params: Tensor) -> None:
    """Refuse what local training cannot use."""
    shape = list(corrected.shape) if isinstance(corrected, Tensor) else corrected
    require(
        isinstance(corrected, Tensor) and corrected.shape == params.shape,
        f"correct of {rule} returns {shape!r}; return the corrected gradient, of shape "
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
            f"end_round of {rule} sums {name!r}, which is no vector; return a tensor of one "
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
    is_tensor = isinstance(params, Tensor)
    require(
        is_tensor and params.shape == before.shape,
        f"{step} returns parameters of shape "
        f"{list(params.shape) if is_tensor else type(params).__name__}, not {list(before.shape)}; "
        "return all of the next parameters as one vector",
    )
    require(
        params.dtype == before.dtype,
        f"{step} returns parameters in {params.dtype}, not {before.dtype}; return them as "
        "params.dtype",
    )
    require(
        _is_named(state),
        f"{step} returns {type(state).__name__} as state; return tensors by name, {{}} for none",
    )
    require(
        isinstance(metrics, Mapping),
        f"{step} returns {type(metrics).__name__} as metrics; return numbers by name, {{}} for "
        "none",
    )
    # a run whose state has other shapes than the initial one could not be resumed
    changed = sorted({name for name, _ in shapes_of(state) ^ shapes_of(initial)})
    require(
        not changed,
        f"{step} returns a state with another {', '.join(changed)} than init; give init the same "
        'names and shapes, e.g. return {"momentum": torch.zeros_like(params)}',
    )
    for name, value in metrics.items():
        require(
            isinstance(value, Tensor | Real),
            f"{step} reports {name} as {type(value).__name__}; report a number",
        )
        require(
            name not in RECORD_FIELDS,
            f"{step} reports a metric called {name}, which every record has; give it another name",
        )
        require(
            not isinstance(value, Tensor) or value.numel() == 1,
            f"{step} reports {name} of shape {list(getattr(value, 'shape', ()))}; report one "
            "number, e.g. its mean",
        )
