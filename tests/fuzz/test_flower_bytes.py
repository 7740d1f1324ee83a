"""What a client or a server of a stranger sends, and what a client's disk has of it."""

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
from flwr.supercore.task_identity import TaskIdentity

import fedexp as fx
from fedexp.flower.client_state import ClientStore
from fedexp.flower.metrics import aggregate_evaluations as mean_of_evaluations
from fedexp.flower.replies import ReplyReader as Reader
from fedexp.flower.replies import aggregate_replies as gather
from fedexp.flower.request import EXTRAS
from fedexp.flower.server import Server
from tests.flower.helpers.plain_app import DIM, first_model
from tests.fuzz.hostile import foreign, fuzz, harmless


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every reply that is left out has a line; there are thousands of them here."""
    logger = logging.getLogger("flwr")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


TYPES = ["<f4", ">f4", "<f8", "<f2", "g", "<i8", "?", "<U3", "<c8", "|V4", "M8[s]", "|S2"]
SHAPES: list[tuple[int, ...]] = [*([(DIM,)] * 6), (), (0,), (1,), (DIM, 1), (1, DIM), (2**20,)]
FLOATS = [0.0, 1.0, -1.0, 1e-45, 1e38, 3e38, np.inf, -np.inf, np.nan]


def raw(draw: Random, usual: tuple[int, ...] = (DIM,)) -> bytes:
    """The bytes of an array: of any type and shape, with a header that may lie, or of nothing."""
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
    return foreign(draw, data) if draw.random() < 0.3 else data


def hostile_reply(draw: Random, asked: Message) -> Message:
    model = first_model()
    arrays = {name: model[name] for name in model}
    for name in draw.sample(["w", "bn.running_mean", "v", "a\nb"], draw.randint(0, 2)):
        stype = draw.choice(["numpy.ndarray", "numpy.ndarray", "torch", ""])
        arrays[name] = Array(draw.choice(["float32", "x"]), (DIM,), stype, raw(draw))
    if draw.random() < 0.1:
        arrays.pop("w")
    numbers: list[Any] = [1, 0, -1, 2**62, 1.5, *FLOATS, [1.0], [], [2**62, 1], 1e300]
    metrics = {"num-examples": draw.choice(numbers), "loss": draw.choice(numbers)}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)})
    extra = Array("float32", (DIM,), "numpy.ndarray", raw(draw))
    content[EXTRAS] = ArrayRecord({draw.choice(["control", "psi", "x"]): extra})
    if draw.random() < 0.3:
        others: list[Any] = [ConfigRecord({"a": "b"}), MetricRecord({"c": 1}), ArrayRecord()]
        content["x"] = draw.choice(others)
    return Message(content, reply_to=asked)


def asked() -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(RecordDict(), 7, "train")
    message.metadata.__dict__["_message_id"] = "1"
    return message


def readers() -> list[Reader]:
    made = []
    for algorithm in (fx.fedexp(), fx.scaffold()):
        server = Server(algorithm, first_model())
        made += [
            Reader(server, "arrays", "num-examples", how) for how in ("uniform", "num-examples")
        ]
    return made


def extras_name(reader: Reader) -> str | None:
    return reader.extras[0] if reader.extras else None


@fuzz(250)
def test_replies(draw: Random) -> None:
    """A reply is used or left out; whatever it is, the round goes on and its sums are finite."""
    reader = draw.choice(readers())
    reply = hostile_reply(draw, asked())
    if (name := extras_name(reader)) and draw.random() < 0.7:
        reply.content[EXTRAS] = ArrayRecord({name: Array("f", (DIM,), "numpy.ndarray", raw(draw))})
    with np.errstate(all="ignore"):
        gathered = harmless(lambda: gather([reply], reader))
        assert not isinstance(gathered, str), gathered
        assert bool(gathered.aggregate.update.isfinite().all())
        assert len(gathered.accepted) + gathered.dropped == 1
        evaluated = harmless(lambda: mean_of_evaluations([reply], "num-examples", None))
    assert evaluated is None or isinstance(evaluated, MetricRecord)


@fuzz(150)
def test_replies_whose_bytes_are_damaged(draw: Random) -> None:
    """What arrives at all: whatever Flower's own reader makes of damaged bytes."""
    reader = readers()[0]
    reply = hostile_reply(draw, asked())
    data = foreign(draw, message_to_proto(reply).SerializeToString())
    try:
        carried = message_from_proto(ProtoMessage.FromString(data))
    except Exception:
        return  # Flower's, before any code of ours
    if carried.has_content():
        with np.errstate(all="ignore"):
            gathered = harmless(lambda: gather([carried], reader))
        assert not isinstance(gathered, str), gathered


@pytest.mark.parametrize("kind", [">f4", "<f8", ">f8", "g", "<f2"])
def test_an_extra_of_any_width_and_order_is_read(kind: str) -> None:
    """Torch takes neither numpy's long doubles nor bytes of another order: both ended the run."""
    reader = next(reader for reader in readers() if reader.extras)
    buffer = io.BytesIO()
    np.save(buffer, np.full(DIM, 0.5).astype(kind))
    extra = Array(kind, (DIM,), "numpy.ndarray", buffer.getvalue())
    content = RecordDict({"arrays": first_model(), "metrics": MetricRecord({"num-examples": 1})})
    content[EXTRAS] = ArrayRecord({reader.extras[0]: extra})
    gathered = gather([Message(content, reply_to=asked())], reader)
    assert gathered.aggregate.extras[reader.extras[0]].tolist() == [0.5] * DIM


@fuzz(100)
def test_states_of_a_client(tmp_path_factory: pytest.TempPathFactory, draw: Random) -> None:
    """A state that cannot be read counts as none, as the docstring says."""
    store = ClientStore(tmp_path_factory.getbasetemp() / "client")
    store.folder.mkdir(exist_ok=True)
    store.save({"control": fx.tasks.toy().objective.initial(0)[0]}, 1, 0)
    whole = (store.folder / "1.safetensors").read_bytes()
    (store.folder / "1.safetensors").write_bytes(foreign(draw, whole))
    found = harmless(lambda: store.load(1))
    assert found is None or isinstance(found, dict)
