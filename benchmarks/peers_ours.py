"""FedAvg by this package; the argument is the engine and, after a slash, the precision."""

from __future__ import annotations

from typing import cast

import numpy as np

import fedexp as fx
from fedexp.data import Federation
from fedexp.engine import EngineName
from fedexp.precision import Precision
from peers_work import LR, assignment, report


def main() -> None:
    job = assignment()
    engine, _, precision = job.engine.partition("/")
    work, (x, y) = job.work, job.work.data()
    offsets = np.arange(work.clients + 1) * work.each
    train = Federation({"x": x.flatten(0, 1), "y": y.flatten()}, offsets)
    local = fx.LocalTraining(lr=LR, epochs=work.epochs, batch_size=work.batch)
    task = fx.tasks.classification("peers", work.build, train, local=local)
    run = fx.simulate(
        task,
        fx.fedavg(),
        job.rounds + 1,  # the last round, which is evaluated, is left out
        work.cohort,
        engine=cast(EngineName, engine),
        device=job.device,
        precision=cast(Precision, precision) if precision else None,
        evaluate_every=10**9,
    )
    records = [next(run) for _ in range(job.rounds)]
    name = records[-1].engine + (f", {precision}" if precision else "")
    report([1e3 * record.seconds for record in records], "numpy", engine=name)


if __name__ == "__main__":
    main()
