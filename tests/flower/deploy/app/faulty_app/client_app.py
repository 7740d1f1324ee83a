"""A client that trains as in the simulator, then spoils its reply if configured to."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from faulty_app.problem import SEED, problem
from fedexp.flower import report_client_id, secure_mod, simulated_train

Arrays = dict[str, NDArray[Any]]


def secure_if_asked(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    if context.run_config["secure"]:
        return secure_mod(msg, context, call_next)
    return call_next(msg, context)


app = ClientApp(mods=[secure_if_asked])
report_client_id(app)
train_as_simulated = simulated_train(problem(), seed=SEED)


@app.train()
def train(msg: Message, context: Context) -> Message:
    fault = _fault(msg, context)
    if fault == "raise":
        raise RuntimeError("this client raises on purpose")
    if fault == "exit":
        os._exit(1)
    if fault == "hang":
        time.sleep(600)
    reply = train_as_simulated(msg, context)
    arrays = {name: array.numpy() for name, array in reply.content.array_records["arrays"].items()}
    if fault in SPOIL:
        spoilt = SPOIL[fault](arrays)
        reply.content["arrays"] = ArrayRecord({n: Array(value) for n, value in spoilt.items()})
    return reply


def _fault(msg: Message, context: Context) -> str:
    """What goes wrong at this node in this round."""
    round = msg.content.config_records["config"]["server-round"]
    here = f"{round!r}:{context.node_config['partition-id']}:"
    faults = str(context.run_config["faults"]).split()
    return next((each.removeprefix(here) for each in faults if each.startswith(here)), "")


def _nan(arrays: Arrays) -> Arrays:
    first = next(iter(arrays))
    return {**arrays, first: np.full_like(arrays[first], np.nan)}


def _shape(arrays: Arrays) -> Arrays:
    first = next(iter(arrays))
    return {**arrays, first: arrays[first][:1]}


def _missing(arrays: Arrays) -> Arrays:
    return dict(list(arrays.items())[1:])


SPOIL = {"nan": _nan, "shape": _shape, "missing": _missing}
