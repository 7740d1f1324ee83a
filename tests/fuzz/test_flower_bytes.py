"""Malformed Flower replies, and damaged client state on disk."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage

import fedexp as fx
from fedexp.flower.client_state import ClientStateFolder
from fedexp.flower.metrics import aggregate_evaluations
from fedexp.flower.replies import ReplyReader, aggregate_replies
from fedexp.flower.request import EXTRAS
from fedexp.flower.server import Server
from tests.flower.helpers.plain_app import DIM, first_model
from tests.fuzz.flower_messages import FLOATS, message_to_client, random_array_bytes
from tests.fuzz.hostile import fuzz, harmless, mutated


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Disable the log: each rejected reply logs a line, and there are thousands here."""
    logger = logging.getLogger("flwr")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def hostile_reply(draw: Random, request: Message) -> Message:
    model = first_model()
    arrays = {name: model[name] for name in model}
    for name in draw.sample(["w", "bn.running_mean", "v", "a\nb"], draw.randint(0, 2)):
        stype = draw.choice(["numpy.ndarray", "numpy.ndarray", "torch", ""])
        arrays[name] = Array(draw.choice(["float32", "x"]), (DIM,), stype, random_array_bytes(draw))
    if draw.random() < 0.1:
        arrays.pop("w")
    numbers: list[Any] = [1, 0, -1, 2**62, 1.5, *FLOATS, [1.0], [], [2**62, 1], 1e300]
    metrics = {"num-examples": draw.choice(numbers), "loss": draw.choice(numbers)}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)})
    extra = Array("float32", (DIM,), "numpy.ndarray", random_array_bytes(draw))
    content[EXTRAS] = ArrayRecord({draw.choice(["control", "psi", "x"]): extra})
    if draw.random() < 0.3:
        others: list[Any] = [ConfigRecord({"a": "b"}), MetricRecord({"c": 1}), ArrayRecord()]
        content["x"] = draw.choice(others)
    return Message(content, reply_to=request)


def readers() -> list[ReplyReader]:
    made = []
    for algorithm in (fx.fedexp(), fx.scaffold()):
        server = Server(algorithm, first_model())
        made += [
            ReplyReader(server, "arrays", "num-examples", how)
            for how in ("uniform", "num-examples")
        ]
    return made


def extras_name(reader: ReplyReader) -> str | None:
    return reader.extras[0] if reader.extras else None


@fuzz(250)
def test_replies(draw: Random) -> None:
    """A reply is used or dropped; in either case the round continues with finite sums."""
    reader = draw.choice(readers())
    reply = hostile_reply(draw, message_to_client())
    if (name := extras_name(reader)) and draw.random() < 0.7:
        reply.content[EXTRAS] = ArrayRecord(
            {name: Array("f", (DIM,), "numpy.ndarray", random_array_bytes(draw))}
        )
    with np.errstate(all="ignore"):
        gathered = harmless(lambda: aggregate_replies([reply], reader))
        assert not isinstance(gathered, str), gathered
        assert bool(gathered.aggregate.update.isfinite().all())
        assert len(gathered.accepted) + gathered.dropped == 1
        evaluated = harmless(lambda: aggregate_evaluations([reply], "num-examples", None))
    assert evaluated is None or isinstance(evaluated, MetricRecord)


@fuzz(150)
def test_replies_whose_bytes_are_damaged(draw: Random) -> None:
    """Damaged messages that Flower itself still parses."""
    reader = readers()[0]
    reply = hostile_reply(draw, message_to_client())
    data = mutated(draw, message_to_proto(reply).SerializeToString())
    try:
        carried = message_from_proto(ProtoMessage.FromString(data))
    except Exception:
        return  # refused by Flower
    if carried.has_content():
        with np.errstate(all="ignore"):
            gathered = harmless(lambda: aggregate_replies([carried], reader))
        assert not isinstance(gathered, str), gathered


@pytest.mark.parametrize("kind", [">f4", "<f8", ">f8", "g", "<f2"])
def test_an_extra_of_any_precision_and_byte_order_is_read(kind: str) -> None:
    """Torch accepts neither long doubles nor other byte orders: both once ended the run."""
    reader = next(reader for reader in readers() if reader.extras)
    buffer = io.BytesIO()
    np.save(buffer, np.full(DIM, 0.5).astype(kind))
    extra = Array(kind, (DIM,), "numpy.ndarray", buffer.getvalue())
    content = RecordDict({"arrays": first_model(), "metrics": MetricRecord({"num-examples": 1})})
    content[EXTRAS] = ArrayRecord({reader.extras[0]: extra})
    gathered = aggregate_replies([Message(content, reply_to=message_to_client())], reader)
    assert gathered.aggregate.extras[reader.extras[0]].tolist() == [0.5] * DIM


@fuzz(100)
def test_damaged_client_state(tmp_path_factory: pytest.TempPathFactory, draw: Random) -> None:
    """Unreadable state is treated as absent."""
    store = ClientStateFolder(tmp_path_factory.getbasetemp() / "client")
    store.folder.mkdir(exist_ok=True)
    store.save({"control": fx.tasks.toy().objective.initial(0)[0]}, 1, 0)
    whole = (store.folder / "1.safetensors").read_bytes()
    (store.folder / "1.safetensors").write_bytes(mutated(draw, whole))
    found = harmless(lambda: store.load(1))
    assert found is None or isinstance(found, dict)
