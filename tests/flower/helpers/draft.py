"""FedExP on Flower over clients that move half way to a target, and the same by its formula.

With the defects of Flower's draft (its pull request 2320) where the arguments say so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord

from fedexp.flower import FedExP
from tests.flower.helpers import plain_app
from tests.flower.helpers.fake_grid import FakeGrid

FIRST = np.linspace(3.0, 7.0, plain_app.DIM)  # the model before the first round on Flower


def on_flower(rounds: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The models that `fedexp.flower.FedExP` sends to clients, and those that it evaluates."""
    sent, evaluated = dict[int, np.ndarray](), list[np.ndarray]()

    def tap(message: Message) -> None:
        if "config" in message.content.config_records:  # it is not a reply
            round: Any = message.content.config_records["config"]["server-round"]
            sent[round] = message.content.array_records["arrays"]["w"].numpy()

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        evaluated.extend([arrays["w"].numpy()] if round else [])
        return None

    grid = FakeGrid(plain_app.plain_app(), 3)
    grid.taps.append(tap)
    strategy = FedExP(eps=0.0, weighting="uniform", fraction_evaluate=0.0)
    model = plain_app.record(FIRST.astype(np.float32), 0.0, 0)
    strategy.start(grid, model, rounds, evaluate_fn=evaluate)
    return [sent[round] for round in range(1, rounds + 1)], evaluated


def in_numpy(
    rounds: int, trains_from_mean: bool = False, previous: np.ndarray | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The same by the formula; with the defects where the arguments say so."""
    sent, evaluated, w = list[np.ndarray](), list[np.ndarray](), FIRST
    targets = np.stack([plain_app.target(client) for client in range(3)])
    for _ in range(rounds):
        sent.append(w)
        deltas = 0.5 * (w - targets)
        mean = deltas.mean(0)
        step = max(1.0, np.square(deltas).sum(1).mean() / (2 * np.square(mean).sum()))
        last = w - step * mean
        evaluated.append(last if previous is None else (last + previous) / 2)
        w, previous = evaluated[-1] if trains_from_mean else last, last
    return sent, evaluated
