"""A client that trains as in the simulator, then spoils its reply if configured to."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from faulty_app.problem import SEED, problem
from fedexp.flower import report_client_id, secure_mod, simulated_train
from fedexp.flower.simulated_client import TrainFn

Arrays = dict[str, NDArray[Any]]


def secure_if_asked(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    if context.run_config["secure"]:
        return secure_mod(msg, context, call_next)
    return call_next(msg, context)


app = ClientApp(mods=[secure_if_asked])
report_client_id(app)


@cache
def train_as_simulated(clients: int) -> TrainFn:
    return simulated_train(problem(clients), seed=SEED)


@app.train()
def train(msg: Message, context: Context) -> Message:
    fault = _fault(msg, context)
    if fault == "raise":
        raise RuntimeError("this client raises on purpose")
    if fault == "exit":
        os._exit(1)
    if fault == "hang":
        time.sleep(600)
    reply = train_as_simulated(int(context.node_config["num-partitions"]))(msg, context)
    if fault in SPOIL:
        spoilt = SPOIL[fault](_arrays(reply))
        reply.content["arrays"] = ArrayRecord({n: Array(value) for n, value in spoilt.items()})
    if fault in FACTORS:
        spoilt = _scaled(_arrays(reply), _arrays(msg), FACTORS[fault])
        reply.content["arrays"] = ArrayRecord({n: Array(value) for n, value in spoilt.items()})
    return reply


def _fault(msg: Message, context: Context) -> str:
    """What goes wrong at this node in this round."""
    round = msg.content.config_records["config"]["server-round"]
    here = f"{round!r}:{context.node_config['partition-id']}:"
    faults = str(context.run_config["faults"]).split()
    return next((each.removeprefix(here) for each in faults if each.startswith(here)), "")


def _arrays(message: Message) -> Arrays:
    record = message.content.array_records["arrays"]
    return {name: array.numpy() for name, array in record.items()}


def _scaled(arrays: Arrays, start: Arrays, factor: float) -> Arrays:
    """Multiply the update of the parameters."""
    updates = {n: value - start[n] for n, value in arrays.items() if not n.startswith("1.")}
    return {**arrays, **{n: start[n] + np.float32(factor) * x for n, x in updates.items()}}


def _variances(arrays: Arrays) -> Arrays:
    return {**arrays, "1.running_var": -arrays["1.running_var"]}


def _nan(arrays: Arrays) -> Arrays:
    first = next(iter(arrays))
    return {**arrays, first: np.full_like(arrays[first], np.nan)}


def _shape(arrays: Arrays) -> Arrays:
    first = next(iter(arrays))
    return {**arrays, first: arrays[first][:1]}


def _missing(arrays: Arrays) -> Arrays:
    return dict(list(arrays.items())[1:])


SPOIL = {"nan": _nan, "shape": _shape, "missing": _missing, "variances": _variances}
FACTORS = {"huge": 1e6, "reversed": -10.0}  # of the update
