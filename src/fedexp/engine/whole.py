"""A whole round as one program: local training, sums and the server's step.

For small models, what the server does between two rounds are dozens of launches that take longer
than their work. Captured together with local training they cost next to nothing, and the host waits
once a round, for a handful of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.aggregate import Aggregate, usable
from fedexp.algorithms import Algorithm
from fedexp.engine.program import LocalProgram
from fedexp.engine.server_step import Model, advanced, moved
from fedexp.engine.state import SimulationState
from fedexp.engine.walks import part
from fedexp.objective import buffer_changes

Tensors = Mapping[str, Tensor]


class Finished(NamedTuple):
    """A round that is over: the state after it, its numbers, and what its clients keep."""

    state: SimulationState
    clients: int
    dropped: int
    metrics: dict[str, float]
    changed: dict[int, Tensors]


@dataclass(frozen=True, eq=False)
class WholeRound:
    """Inputs are those of the local program and `server.*`; small ones come `packed`.

    Outputs: the model after the step (`params`, `averaged`, `server.*`, `shared.*`), what clients
    keep (`after.*` [K, ...]) with `good` [K], the metrics, and all numbers in `numbers`.
    """

    local: LocalProgram
    algorithm: Algorithm
    total_weight: float

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        inputs = unpacked(inputs)
        trained = self.local(inputs)
        shared, mine = part(inputs, "shared."), part(inputs, "mine.")
        deltas = inputs["params"] - trained["params"]
        travel = inputs["travel"].to(deltas.dtype)
        kept, extras = self.algorithm.client.finish(deltas, travel, shared, mine)
        if trained["averaged"].numel():
            changes = buffer_changes(trained["averaged"], inputs["averaged"])
            extras = {**extras, "buffers": changes}
        aggregate = Aggregate.of_checked(deltas, inputs["weights"], extras)
        before = Model(inputs["params"], inputs["averaged"], part(inputs, "server."), shared)
        model, metrics = moved(self.algorithm, before, aggregate, self.total_weight)
        numbers = [aggregate.count, aggregate.dropped, *(metrics[n] for n in sorted(metrics))]
        return {
            "params": model.params,
            "averaged": model.averaged,
            "numbers": torch.stack([n.to(torch.float64) for n in numbers]),
            **({"good": usable(deltas, extras)} if kept else {}),
            **_named("server.", model.server),
            **_named("shared.", model.shared),
            **_named("after.", kept),
            **_named("metric.", metrics),
        }


def finished(
    outputs: Tensors, state: SimulationState, algorithm: Algorithm, clients: list[int]
) -> Finished:
    """What a round has come to; copies, because the next one writes over its outputs."""
    lasting = (n for n in outputs if n != "numbers" and not n.startswith("metric."))
    own = {name: outputs[name].clone() for name in lasting}
    count, dropped, *values = outputs["numbers"].tolist()  # here the host waits
    if not count:
        return Finished(state, 0, int(dropped), {}, {})
    server, shared, kept = (part(own, prefix) for prefix in ("server.", "shared.", "after."))
    model = Model(own["params"], own["averaged"], server, shared)
    metrics = dict(zip(sorted(part(outputs, "metric.")), values, strict=True))
    changed = unstacked(kept, clients, own["good"]) if kept else {}
    return Finished(advanced(state, model, algorithm), int(count), int(dropped), metrics, changed)


def unstacked(kept: Tensors, clients: Sequence[int], good: Tensor) -> dict[int, Tensors]:
    """The states of the clients whose updates count."""
    rows = [{name: value[k] for name, value in kept.items()} for k in range(len(clients))]
    return {c: row for c, row, ok in zip(clients, rows, good.tolist(), strict=True) if ok}


def packed(
    key: int, lr: float, who: NDArray[np.int64], steps: NDArray[np.int64], weights: list[float]
) -> NDArray[np.int64]:
    """The small inputs as one array of 64 bits each, because every transfer takes its time."""
    numbers = np.concatenate([[lr], steps * lr, weights]).view(np.int64)
    return np.concatenate([[key], who.ravel(), numbers])


def unpacked(inputs: Tensors) -> dict[str, Tensor]:
    """The inputs with `key`, `who`, `lr`, `travel` [K, 1] and `weights` [K] for `packed`."""
    clients = (len(inputs["packed"]) - 2) // 5
    key, who, *numbers = inputs["packed"].split([1, 3 * clients, 1, clients, clients])
    lr, travel, weights = (each.view(torch.float64) for each in numbers)
    rest = {name: value for name, value in inputs.items() if name != "packed"}
    small = {"key": key[0], "who": who.view(3, clients), "lr": lr[0]}
    return {**rest, **small, "travel": travel[:, None], "weights": weights}


def _named(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}
