"""The modes of a named algorithm: the paper's values for a task, the authors' code, our advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedexp.algorithms import RECOMMENDED_EPS, Algorithm
from fedexp.client import SGD
from fedexp.options import Setup
from fedexp.server import ExP
from fedexp.tasks.task import Task


def printed_eps(setup: Setup, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which FedExP's eps is the printed one, unless they have an eps_mode."""
    names = {setup.full_name(key) for key in options}
    is_printed = setup.algorithm.name == "fedexp" and "server.eps" in names
    if not is_printed or "server.eps_mode" in names:
        return dict(options)
    return {**options, "server.eps_mode": "absolute"}


def paper_setup(task: Task, algorithm: Algorithm) -> Setup:
    """Return the algorithm with the values that are tuned for the task, the paper's on its tasks.

    An eps among them is the printed one. FedExP without one has its default, which is relative.
    """
    setup = Setup(algorithm, task.local)
    return setup.with_options(printed_eps(setup, task.tuned.get(algorithm.name, {})))


def authors_code(task: Task, algorithm: Algorithm) -> Setup:
    """Return what the authors' released code does (docs/paper.md#released-code).

    eps times the participants, eps decayed by the square of the step-size decay, both decays before
    the first round, weights by data size, FedExP-M without its momentum, its own variants of
    FedAdagrad and FedAdam, and the task's released values. Not the accidents of a script: one round
    more than asked for (docs/paper.md#released-extra-round), NaN for a zero update
    (docs/paper.md#released-nan).
    """
    setup = paper_setup(task, algorithm)
    local = replace(setup.local, decay_before_first_round=True)
    server = setup.algorithm.server.released(local.lr_decay)
    released = Setup(replace(setup.algorithm, server=server), local, "size")
    return released.with_options(task.released.get(algorithm.name, {}))


def recommended(task: Task, algorithm: Algorithm) -> Setup:
    """Return what this project recommends: FedExP with a relative eps, the same for every task.

    The client step size is the paper's best value for the task, as in mode paper, since none can do
    without one. Where eps is 0 because all clients can fit one model (the toy and the synthetic
    problem), it stays 0. All other algorithms are those of mode paper: for the variants of FedExP
    the relative form did not meet the criteria of its study (docs/eps-study.md).
    """
    setup = paper_setup(task, algorithm)
    server, client = setup.algorithm.server, setup.algorithm.client
    if type(server) is not ExP or type(client) is not SGD:
        return setup
    eps = RECOMMENDED_EPS if server.eps else 0.0
    return setup.with_options({"server.eps": eps, "server.eps_mode": "relative"})


MODES = {"paper": paper_setup, "authors-code": authors_code, "recommended": recommended}
