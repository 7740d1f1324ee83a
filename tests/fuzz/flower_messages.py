"""Random Flower messages: arrays of any type, shape and header, and a request to answer."""

from __future__ import annotations

import io
from random import Random

import numpy as np
from flwr.app import Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from tests.flower.helpers.plain_app import DIM
from tests.fuzz.hostile import mutated

TYPES = ["<f4", ">f4", "<f8", "<f2", "g", "<i8", "?", "<U3", "<c8", "|V4", "M8[s]", "|S2"]
SHAPES: list[tuple[int, ...]] = [*([(DIM,)] * 6), (), (0,), (1,), (DIM, 1), (1, DIM), (2**20,)]
FLOATS = [0.0, 1.0, -1.0, 1e-45, 1e38, 3e38, np.inf, -np.inf, np.nan]


def random_array_bytes(draw: Random, usual: tuple[int, ...] = (DIM,)) -> bytes:
    """Return a serialized array of random type and shape; its header may not fit its content."""
    with np.errstate(all="ignore"):
        shape = draw.choice(SHAPES)
        value = np.full(usual if shape == (DIM,) else shape, draw.choice(FLOATS)).astype("f4")
        kind = draw.choice(TYPES) if draw.random() < 0.4 else "<f4"
        value = np.zeros(value.shape, kind) if kind not in ("<f4", "<f2") else value.astype(kind)
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=False)
    data = buffer.getvalue()
    if draw.random() < 0.2:
        data = data.replace(
            b"'shape': (5,)", draw.choice([b"'shape': (10**12,)", b"'shape': (-5,)"])
        )
        data = data.replace(b"(5,), }      ", b"(999999999,),}")
    return mutated(draw, data) if draw.random() < 0.3 else data


def message_to_client() -> Message:
    """Return an empty training request, for replies to refer to."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(RecordDict(), 7, "train")
    message.metadata.__dict__["_message_id"] = "1"
    return message
