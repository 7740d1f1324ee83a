"""Malformed Flower records: model layouts, stages of secure aggregation, privacy ledgers."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Stage
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from torch import nn

import fedexp as fx
from fedexp.flower.layout import apparent_ties
from fedexp.flower.privacy import FILE, FOLDER, open_ledger, spend
from fedexp.flower.replies import AggregatedReplies, ReplyReader, aggregate_replies
from fedexp.flower.request import BROADCAST, REPLY_INFO, TrainRequest
from fedexp.flower.secure.payload import SecureAggregation
from fedexp.flower.secure.round import StageGrid
from fedexp.flower.server import Server
from fedexp.privacy import BudgetSpentError, Release
from tests.flower.helpers.fake_grid import Answer, FakeGrid, Fault
from tests.flower.helpers.secure import app_of, at_stage, random_updates, secure_round, server_of
from tests.fuzz.flower_messages import message_to_client, random_array_bytes
from tests.fuzz.hostile import forged, fuzz, harmless, mutated


class LogCheck(logging.Handler):
    """Check that each log record is one printable line of limited length."""

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage().lstrip("\t")
        assert line.isprintable(), repr(line)
        assert len(line) < 1000, line[:1000]

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # logging calls this when emit has raised


@pytest.fixture(autouse=True)
def checked_log() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    before, logger.handlers = logger.handlers, [LogCheck()]
    yield
    logger.handlers = before


class Tied(nn.Module):
    """A model with a tied weight, a buffer that is not of BatchNorm, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.plain = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", 0.5 * nn.Parameter(self.first.weight[0]).detach())


MODEL = Tied()
ARRAYS = {name: value.detach().numpy().copy() for name, value in MODEL.state_dict().items()}
NAMES = [*ARRAYS, "unknown", "a\nb", "\x1b[2J", "", "x" * 5000]
SECURE, SIZE = SecureAggregation(clip=2.0), 8 + 3  # numbers masked by a client
SCALARS: list[Any] = [0, -1, 2**62, 0.5, float("nan"), "a\nb", "x" * 5000, b"\0", b"x" * 99, True]


def names(draw: Random) -> Any:
    """Return a list of names, or another value that a record can hold."""
    kind = draw.random()
    if kind < 0.75:
        return draw.choices(NAMES[:4] if kind < 0.5 else NAMES, k=draw.randint(0, 4))
    return draw.choice([*SCALARS, [1, 2], [b"w"], [0.5], [True]])


def layout_record(draw: Random, prefix: str = "") -> dict[str, Any]:
    terms = {"rule": "sgd", "buffers": ["seen"], "tied": ["second.weight"]}
    terms["tied-to"] = ["first.weight"]
    for key in draw.sample([*terms, "x"], draw.randint(0, 3)):
        terms[key] = names(draw)
    for key in draw.sample(list(terms), draw.randint(0, 1)):
        del terms[key]
    return {f"{prefix}{key}": value for key, value in terms.items()}


def model_record(draw: Random) -> ArrayRecord:
    arrays = {name: Array(value) for name, value in ARRAYS.items()}
    for name in draw.sample(list(arrays), draw.choice([0, 0, 1, 2])):
        data, shape = random_array_bytes(draw), ARRAYS[name].shape
        if draw.random() < 0.6:
            buffer = io.BytesIO()
            kind = draw.choice(["<f4", ">f4", "g", "<U3", "|S2", "|V4", "<c8", "M8[s]", "<i8"])
            np.save(buffer, np.zeros(shape, kind), allow_pickle=False)
            data = buffer.getvalue()
        arrays[name] = Array("float32", shape, "numpy.ndarray", data)
    return ArrayRecord(arrays)


def reply_about(draw: Random) -> Message:
    if draw.random() < 0.1:
        return Message(
            Error(draw.choice([0, 7, 99]), draw.choice(["", "a\x1b[2J", "x" * 5000])),
            reply_to=message_to_client(),
        )
    content = RecordDict({"arrays": model_record(draw), "m": MetricRecord({"num-examples": 2})})
    if draw.random() < 0.7:
        content[REPLY_INFO] = ConfigRecord(layout_record(draw))
    return Message(content, reply_to=message_to_client())


@fuzz(100)
def test_replies_with_a_model_layout(draw: Random) -> None:
    """Sums are finite, and the layout covers the model's own arrays."""
    arrays = ArrayRecord({name: Array(value) for name, value in ARRAYS.items()})
    server = Server(draw.choice([fx.fedexp(), fx.fedadam()]), arrays, None, apparent_ties(arrays))
    parts = draw.choice([{"buffers", "tied"}, {"tied"}, set[str]()])
    reader = ReplyReader(server, "arrays", "num-examples", "uniform", None, parts)
    some = [reply_about(draw) for _ in range(draw.randint(1, 5))]
    with np.errstate(all="ignore"):
        gathered = harmless(lambda: aggregate_replies(some, reader))
    assert isinstance(gathered, AggregatedReplies), gathered
    assert len(gathered.accepted) + gathered.dropped + len(gathered.unanswered) == len(some)
    assert bool(gathered.aggregate.update.isfinite().all())
    assert {slot.name for slot in server.layout.slots} == ARRAYS.keys()


@fuzz(120)
def test_requests_with_a_model_layout(
    tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    config: dict[str, Any] = {"server-round": 1, "fedexp.client": "sgd", "fedexp.api": "one"}
    config |= layout_record(draw, "fedexp.")
    for key in draw.sample(list(config), draw.randint(0, 2)):
        config[key] = draw.choice([*SCALARS, "prox", "scaffold", "../up"])
    message = message_to_client()
    message.content.update({"arrays": model_record(draw), "config": ConfigRecord(config)})
    if draw.random() < 0.5:
        sent = {"control": Array("float32", (8,), "numpy.ndarray", random_array_bytes(draw, (8,)))}
        message.content[BROADCAST] = ArrayRecord(sent)
        message.content.config_records["config"]["fedexp.client"] = "scaffold"
    home: dict[str, Any] = {"fedexp-state": str(tmp_path_factory.getbasetemp() / "requests")}
    context = Context(1, 1, home, RecordDict(), {})
    model = draw.choice([MODEL, None])
    with np.errstate(all="ignore"):
        found = harmless(lambda: TrainRequest.of(message, context, model))
    assert isinstance(found, str | TrainRequest)


def damage_stage(draw: Random, content: RecordDict) -> None:
    """Change a client's message in a stage: a value, a list, an array or a record."""
    if draw.random() < 0.15:
        del content[draw.choice(list(content))]
    config: Any = content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
    for key in draw.sample(list(config), min(len(config), draw.randint(0, 2))):
        value = config[key]
        if isinstance(value, list) and value and draw.random() < 0.6:
            at = draw.randrange(len(value))
            if isinstance(value[at], bytes):
                value[at] = mutated(draw, value[at] or b"x")
            else:
                value[at] = draw.choice([0, -1, 2**62])
            config[key] = value * draw.choice([1, 1, 2, 0])
        elif isinstance(value, bytes) and draw.random() < 0.6:
            config[key] = mutated(draw, value or b"x")
        else:
            config[key] = draw.choice([*SCALARS, [], [1], [b"x"], ["a\nb"]])
    for record in content.metric_records.values():
        if draw.random() < 0.2:
            record[draw.choice([*record, "x"])] = draw.choice([0, 1, -1, 2**62, float("nan")])


def malformed(draw: Random) -> Fault:
    def answer_with_damage(message: Message, answer: Answer) -> Message | None:
        if draw.random() < 0.1:
            return Message(Error(1, draw.choice(["", "a\nb\x1b[2J", "x" * 5000])), reply_to=message)
        reply = answer()
        if reply.has_content():
            damage_stage(draw, reply.content)
        return reply

    return answer_with_damage


class Stages(dict[str, tuple[bytes, bytes]]):
    """A request and a valid reply by stage, as bytes; a failure report shows the stages only."""

    def __repr__(self) -> str:
        return f"Stages({', '.join(self)})"


@pytest.fixture(scope="module")
def stages() -> Stages:
    grid, found = FakeGrid(app_of(random_updates(8)), 3), Stages()
    sent: dict[str, tuple[str, bytes]] = {}

    def tap(message: Message) -> None:
        data, about = message_to_proto(message).SerializeToString(), message.metadata
        if about.reply_to_message_id:
            stage, question = sent[about.reply_to_message_id]
            found[stage] = question, data
        else:
            stage = str(message.content.config_records[RECORD_KEY_CONFIGS]["stage"])
            sent[about.message_id] = stage, data

    grid.taps.append(tap)
    secure_round(server_of(8), grid, SECURE)
    return found


@fuzz(120)
def test_replies_in_the_stages_of_secure_aggregation(stages: Stages, draw: Random) -> None:
    """A reply is passed to Flower's workflow, or its client drops out."""
    sent, reply = (
        message_from_proto(ProtoMessage.FromString(data))
        for data in stages[draw.choice(Stage.all())]
    )
    app: Any = lambda message, _: Message(reply.content, reply_to=message)  # noqa: E731
    grid = FakeGrid(app, 1)
    grid.nodes[0].node_id, grid.nodes[0].fault = sent.metadata.dst_node_id, malformed(draw)
    waiting = StageGrid(grid, SIZE, 60.0)
    asked = Message(sent.content, sent.metadata.dst_node_id, "train")
    with np.errstate(all="ignore"):
        found = harmless(lambda: waiting.send_and_receive([asked]))
    assert len(found) + len(waiting.refused) == 1


@fuzz(6)
def test_rounds_of_secure_aggregation(draw: Random) -> None:
    """One client of four sends malformed replies; sums are finite and the round completes."""
    fault = at_stage(draw.choice(Stage.all()), malformed(draw))
    grid = FakeGrid(app_of(random_updates(8)), 4, faults={1: fault})
    server = server_of(8)
    with np.errstate(all="ignore"):
        found = harmless(lambda: secure_round(server, grid, SECURE))
    assert isinstance(found, AggregatedReplies), found
    assert bool(found.aggregate.update.isfinite().all())
    assert np.isfinite(float(found.aggregate.sq_norm))
    server.step(found.aggregate, 4)


RELEASED = {
    "releases": [
        {"noise_multiplier": 2.0, "sampling": "poisson", "clients": 90, "cohort": 9, "count": 3},
        {"noise_multiplier": 1.0, "sampling": "known", "clients": 9, "cohort": 9, "count": 2},
    ]
}
NUMBERS: list[Any] = [1e-320, 1e-160, 1e160, 1e308, 2**53, 2**62, 10**30, 0.1, 3]


def ledger_bytes(draw: Random) -> bytes:
    """Return a privacy ledger that is damaged, has wrong types, or extreme numbers."""
    if draw.random() < 0.3:
        return mutated(draw, json.dumps(RELEASED).encode())
    if draw.random() < 0.5:
        return json.dumps(forged(draw, RELEASED)).encode()
    tree = json.loads(json.dumps(RELEASED))
    for _ in range(draw.randint(1, 3)):
        row = draw.choice(tree["releases"])
        row[draw.choice(["noise_multiplier", "clients", "cohort", "count"])] = draw.choice(NUMBERS)
    return json.dumps(tree).encode()


@fuzz(200)
def test_the_ledger_of_a_client(tmp_path_factory: pytest.TempPathFactory, draw: Random) -> None:
    """A release is added to the ledger, or refused with the file unchanged."""
    account = tmp_path_factory.getbasetemp() / FOLDER / "a" / "b"
    path = account / FILE
    account.mkdir(parents=True, exist_ok=True)
    path.write_bytes(before := ledger_bytes(draw))
    if harmless(lambda: spend(account, Release(1.0), 8), writes=True):
        assert path.read_bytes() == before
        return
    rows, old = (json.loads(data)["releases"] for data in (path.read_bytes(), before))
    assert sum(row["count"] for row in rows) == sum(row["count"] for row in old) + 1
    assert (
        sum(row["count"] / row["noise_multiplier"] / row["noise_multiplier"] for row in rows)
        <= 8.0001
    )


@fuzz(60)
def test_the_ledger_of_a_run(tmp_path_factory: pytest.TempPathFactory, draw: Random) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "account.json"
    path.write_bytes(ledger_bytes(draw))

    def start() -> float | str:
        ledger = open_ledger(path, draw.choice([0, 5]))
        try:
            ledger.require_room(Release(1.0, "known", 9, 9), 8.0, 1e-5)
        except BudgetSpentError as error:
            return str(error)
        return ledger.epsilon(1e-5)

    found = harmless(start)
    assert found if isinstance(found, str) else 0 <= found <= 8.0001
