"""FedAvg by this package, by the engine that the driver names, and maybe a precision."""

from __future__ import annotations

from typing import cast

import numpy as np

import fedexp as fx
from fedexp.data import Federation
from fedexp.engine import EngineName
from fedexp.precision import Precision
from peers_work import LR, assignment, report


def main() -> None:
    asked = assignment()
    engine, _, precision = asked.form.partition("/")
    work, (x, y) = asked.work, asked.work.data()
    offsets = np.arange(work.clients + 1) * work.each
    train = Federation({"x": x.flatten(0, 1), "y": y.flatten()}, offsets)
    local = fx.LocalTraining(lr=LR, epochs=work.epochs, batch_size=work.batch)
    task = fx.tasks.classification("peers", work.build, train, local=local)
    run = fx.simulate(
        task,
        fx.fedavg(),
        asked.rounds + 1,  # the last would be evaluated, and is left out
        work.cohort,
        engine=cast(EngineName, engine),
        device=asked.device,
        precision=cast(Precision, precision) if precision else None,
        evaluate_every=10**9,
    )
    report([1e3 * next(run).seconds for _ in range(asked.rounds)], "numpy")


if __name__ == "__main__":
    main()
