"""`Task`: a problem, its data, and how it is trained unless the caller says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedexp.data.federation import Batch, Federation
from fedexp.data.streamed import on_device
from fedexp.data.transform import Transform
from fedexp.errors import require
from fedexp.local import LocalTraining
from fedexp.objective import Buffers, Objective
from fedexp.precision import Precision

Weighting = Literal["uniform", "size"]
# Activations of a convolutional network on more would not fit a CPU's cache; a GPU wants work.
EVALUATION_ROWS = {"cpu": 512, "cuda": 2048}


@dataclass(frozen=True, eq=False)
class Task:
    """Everything an engine needs to know about a federated problem.

    Attributes:
        name: what the task is called on the command line and in records.
        objective: the local loss.
        train: the clients' data.
        test: held-out examples, or None.
        transform: what happens to a batch before the model sees it, or None.
        local: default settings of local training.
        metric: the record field that the task is judged by.
        target: value of `metric` that counts as reached.
        rounds: default number of rounds.
        cohort: default number of clients a round; None for all.
        evaluate_every: default number of rounds between evaluations, which cost a pass over all
            clients' data.
        tuned: options by algorithm, as `--set` takes them; the paper's best values (audit A4).
        released: the same for the authors' released code, where it differs (audit B).
        sums: whether F_i sums over examples (least squares) instead of averaging.
    """

    name: str
    objective: Objective
    train: Federation
    local: LocalTraining
    test: Batch | None = None
    transform: Transform | None = None
    metric: str = "test_accuracy"
    target: float | None = None
    rounds: int = 100
    cohort: int | None = None
    evaluate_every: int = 1
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    released: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sums: bool = False

    def to(self, device: torch.device, precision: Precision) -> Task:
        """The task with its data and objective on a device, computing in a precision."""
        move = getattr(self.objective, "on", None)
        require(move is not None, "this objective cannot change devices; give it a method `on`")
        assert move is not None
        test = self.test and {name: value.to(device) for name, value in self.test.items()}
        train = on_device(self.train, device)
        return replace(self, objective=move(device, precision), train=train, test=test)

    def evaluate(
        self, params: Tensor, buffers: Buffers, share: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Training loss F(w), the mean over all clients; test loss; accuracies where they exist.

        Clients count alike in F whatever their weights in training, as in the paper (eq. 1). Of the
        examples, share (k, n) looks at the k-th of n parts only: what the parts give adds up.
        """
        if self.sums:
            rows = len(self.train.fields["y"])
            weights = torch.full((rows,), 1 / self.train.clients, dtype=torch.float64)
        else:
            weights = self.train.example_weights(by_size=False)
        values = self._weighted(params, buffers, self.train.fields, weights, "train", share)
        if self.test is not None:
            rows = len(self.test["y"])
            even = torch.full((rows,), 1 / rows, dtype=torch.float64)
            values |= self._weighted(params, buffers, self.test, even, "test", share)
        return values

    def _weighted(
        self,
        params: Tensor,
        buffers: Buffers,
        batch: Batch,
        weights: Tensor,
        split: str,
        share: tuple[int, int],
    ) -> dict[str, float]:
        totals: dict[str, Tensor] = {}
        weights = weights.to(params.device)
        together = EVALUATION_ROWS[params.device.type]
        first, last = (len(weights) * each // share[1] for each in (share[0], share[0] + 1))
        for start in range(first, last, together):
            rows = slice(start, min(start + together, last))
            piece = {name: value[rows].to(params.device) for name, value in batch.items()}
            if self.transform is not None:
                piece = dict(self.transform.evaluate(piece))
            for name, value in self.objective.measure(params, buffers, piece).items():
                weighted = value.to(torch.float64) @ weights[rows]
                key = f"{split}_{name}"
                totals[key] = totals[key] + weighted if key in totals else weighted
        return {name: value.item() for name, value in totals.items()}
