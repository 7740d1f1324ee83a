"""Damaged and forged run folders and archives: one error line or a run, and no file changed."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tomli_w
import torch

from fedexp.algorithms import fedadam
from fedexp.engine import SimulationState
from fedexp.engine.client_store import StoredStates
from fedexp.errors import DivergedError, UsageError
from fedexp.objective import Buffers
from fedexp.plain import id_of
from fedexp.runs import load_run
from fedexp.runs.checkpoint import BEFORE, NEWEST
from fedexp.runs.fingerprint import Fingerprint
from fedexp.runs.folder import (
    ENVIRONMENT,
    FINGERPRINT,
    RESULT,
    RunFolder,
    check_content,
    machine,
)
from fedexp.runs.journal import Journal
from fedexp.runs.read import HEAD, texts
from fedexp.runs.records import RECORDS
from fedexp.runs.spec import SPEC, read_spec
from tests.fuzz.hostile import Files, contents, forged, fuzz, harmless, mutated
from tests.runs.helpers import execute_in, interrupted, tiny

CPU = torch.device("cpu")
FLOWER_SPEC = {
    "task": "app", "algorithm": "fedadam", "mode": "paper", "seed": 0, "rounds": 9,
    "evaluate_every": 1, "engine": "flower", "deterministic": False, "set": {}, "options": {},
}  # fmt: skip
ABOUT = machine()
Run = Files  # of a run folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A finished run and a stopped one.

    The clock is fixed, so that the files are the same in every session.
    """
    root = tmp_path_factory.mktemp("runs")
    spec = tiny("scaffold-exp", 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 1.0)
        patch.setattr(time, "strftime", lambda *_: "2026-01-02T03:04:05+0000")
        patch.setattr(sys, "argv", ["fedexp"])
        execute_in(root / "finished", spec)
        interrupted(spec, root / "stopped", 4, checkpoint_every=0)
    return {path.name: contents(path) for path in root.iterdir()}


def put(folder: Path, files: Mapping[str, bytes], replaced: Mapping[str, bytes]) -> Path:
    """Write these files, some of them replaced, and remove all others; return the folder."""
    wanted = {**files, **replaced}
    for name, data in wanted.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    for path in folder.iterdir():
        if path.name not in wanted:
            path.unlink()
    return folder


def read(folder: Path) -> Any:
    """Read everything that tables, curves and resuming read of a stored run."""
    run = load_run(folder)
    outcome = run.outcome()
    return [outcome.curve(name) for row in outcome.rows for name in row if name != "round"]


def is_refused_or_read(folder: Path) -> None:
    before = contents(folder)
    harmless(lambda: read(folder))
    assert contents(folder) == before


def in_memory(state: SimulationState) -> SimulationState:
    """Read client state, as a run does that stores it in memory."""
    clients = state.clients
    return replace(
        state, clients=clients.in_memory() if isinstance(clients, StoredStates) else clients
    )


def is_refused_or_resumed(folder: Path) -> None:
    """Open a run folder to resume it; if that is refused, no file has changed."""

    def opened() -> str:
        spec = {k: v for k, v in read_spec(folder).items() if k not in ("format", "id")}
        with RunFolder(folder, spec, ABOUT) as held:
            journal = Journal(held, 0.0, CPU, in_memory)
            journal.close()
            held.threads()
            held.note_resumed(journal.resumed_from)
        return ""

    before = contents(folder)
    if harmless(opened, writes=True):
        assert contents(folder) == {**before, ".lock": b""}


FILES = (SPEC, RECORDS, RESULT, ENVIRONMENT)


@fuzz(120)
def test_damaged_files_of_a_finished_run(
    runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    files = runs["finished"]
    name = draw.choice(FILES)
    damaged = mutated(draw, files[name])
    folder = put(tmp_path_factory.getbasetemp() / "finished", files, {name: damaged})
    is_refused_or_read(folder)


def encoded(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def signed_checkpoint(tree: Any) -> bytes:
    """Encode a checkpoint with a valid digest, which an attacker can compute too."""
    if isinstance(tree, dict):
        content = {name: each for name, each in tree.items() if name != "sha256"}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        tree = {**content, "sha256": digest}
    return json.dumps(tree).encode()


def toml(tree: Any) -> Any:
    """Remove None, which TOML cannot represent."""
    if isinstance(tree, dict):
        return {key: toml(each) for key, each in tree.items() if each is not None}
    return [toml(each) for each in tree if each is not None] if isinstance(tree, list) else tree


def signed_spec(tree: Any) -> bytes:
    if not isinstance(tree, dict):
        return encoded(tree)
    own = toml({name: each for name, each in tree.items() if name not in ("format", "id")})
    with suppress(KeyError):
        tree = {**tree, "id": id_of(own)}
    return tomli_w.dumps(toml(tree)).encode()


@fuzz(150)
def test_forged_files_of_a_finished_run(
    runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    files = runs["finished"]
    folder = put(tmp_path_factory.getbasetemp() / "forged", files, {})
    name = draw.choice(FILES)
    if name == SPEC:
        damaged = signed_spec(forged(draw, read_spec(folder)))
    elif name == RECORDS:
        rows = [json.loads(line) for line in files[name].splitlines()]
        damaged = b"".join(encoded(row) + b"\n" for row in rows[:-1])
        damaged += encoded(forged(draw, rows[-1])) + b"\n"
    else:
        damaged = encoded(forged(draw, json.loads(files[name])))
    is_refused_or_read(put(folder, files, {name: damaged}))


@fuzz(100)
def test_damaged_files_of_a_resumed_run(
    runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    files = runs["stopped"]
    names = [name for name in files if name.startswith("checkpoint") or name in FILES]
    name = draw.choice(sorted(names))
    folder = tmp_path_factory.getbasetemp() / "resumed"
    is_refused_or_resumed(put(folder, files, {name: mutated(draw, files[name])}))


@fuzz(150)
def test_forged_checkpoints(
    runs: dict[str, Run], diverged: Run, tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    """The parts of a checkpoint are forged with it, so that their digests match."""
    files = draw.choice([runs["stopped"], diverged])
    listed = json.loads(files[NEWEST])
    damaged: dict[str, bytes] = {}
    if draw.random() < 0.5:
        part = draw.choice(_parts(listed))
        damaged[part["file"]] = mutated(draw, files[part["file"]])
        part["sha256"] = hashlib.sha256(damaged[part["file"]]).hexdigest()
    else:
        listed = forged(draw, listed)
    damaged[NEWEST] = signed_checkpoint(listed)
    folder = tmp_path_factory.getbasetemp() / "forged-checkpoint"
    put(folder, files, damaged)
    (folder / BEFORE).unlink(missing_ok=True)
    is_refused_or_resumed(folder)


@fuzz(150)
def test_fingerprints(
    runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    """Content that is equal, different or unknown: one error line in the last two cases."""
    files = runs["finished"]
    whole = json.loads(files[FINGERPRINT])
    candidates = encoded(forged(draw, whole)), mutated(draw, files[FINGERPRINT])
    folder = tmp_path_factory.getbasetemp() / "fingerprint"
    put(folder, files, {FINGERPRINT: draw.choice(candidates)})
    before = contents(folder)
    wanted = Fingerprint.from_json(whole)
    line = harmless(lambda: check_content(folder, wanted))
    assert line is None or str(folder) in line
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("numerics", "name"),
    [("Infinity", "x"), ("1e999", "x"), ("true", "x"), ("2", "a\\nb"), ("2", "\\u001b[2J")],
)
def test_an_invalid_fingerprint(
    numerics: str, name: str, runs: dict[str, Run], tmp_path: Path
) -> None:
    text = f'{{"format": 1, "numerics": {numerics}, "digests": {{"{name}": {{}}}}}}'
    folder = put(tmp_path / "run", runs["finished"], {FINGERPRINT: text.encode()})
    wanted = Fingerprint.from_json(json.loads(runs["finished"][FINGERPRINT]))
    assert "is damaged" in harmless(lambda: check_content(folder, wanted))


def state(round: int) -> SimulationState:
    start = SimulationState.of(torch.ones(3), Buffers.none(), fedadam())
    return replace(start, round=round)


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that diverged, was reopened and resumed with more rounds, and diverged again.

    It has earlier states to fall back to.
    """
    folder = tmp_path_factory.mktemp("diverged") / "run"
    for rounds in (8, 9):
        spec = {**FLOWER_SPEC, "rounds": rounds}
        with RunFolder(folder, spec, ABOUT, may_change=["rounds"]) as held:
            held.reopen()
            journal = Journal(held, 0.0, CPU)
            held.note_resumed(journal.resumed_from)
            for round in range(len(journal.rows) + 1, 4):
                earlier = tuple(state(each) for each in range(round))
                journal.add({"round": round, "seconds": 0.0}, state(round), earlier)
            journal.conclude("diverged", None, DivergedError(4, "test_loss is inf"))
            journal.close()
    return contents(folder)


@fuzz(100)
def test_reopening_a_diverged_run(
    diverged: Run, tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    """It is reopened, and recorded as valid JSON, or refused in one line."""
    name = draw.choice([ENVIRONMENT, ENVIRONMENT, RESULT, NEWEST, BEFORE])
    tree = json.loads(diverged[name])
    if name == ENVIRONMENT and draw.random() < 0.7:
        lists = ("reopened", "resumed")
        tree |= {key: forged(draw, tree[key]) for key in lists}
    elif name != NEWEST or draw.random() < 0.5:
        tree = forged(draw, tree)
    data = encoded(tree) if draw.random() < 0.8 else mutated(draw, diverged[name])
    folder = put(tmp_path_factory.getbasetemp() / "reopened", diverged, {name: data})

    def reopened() -> str:
        with RunFolder(folder, FLOWER_SPEC, ABOUT) as held:
            held.reopen()
            journal = Journal(held, 0.0, CPU)
            journal.close()
            for name, values in held.note_resumed(journal.resumed_from).items():
                assert isinstance(name, str)
                assert len(values) == 2
        return ""

    if not harmless(reopened, writes=True):
        noted = json.loads((folder / ENVIRONMENT).read_bytes(), parse_constant=pytest.fail)
        assert isinstance(noted["resumed"][-1]["round"], int)


@pytest.mark.parametrize("kind", ["slots", "model"])
def test_a_forged_file_list_cannot_leave_the_folder(
    kind: str, runs: dict[str, Run], tmp_path: Path
) -> None:
    """Slots are opened for writing, so a forged list could overwrite any file of the user."""
    other = tmp_path / "precious"
    listed = json.loads(runs["stopped"][NEWEST])
    other.write_bytes(runs["stopped"][listed[kind]["file"]])
    listed[kind]["file"] = "../precious"
    files = {k: v for k, v in runs["stopped"].items() if k != BEFORE}
    folder = put(tmp_path / "run", files, {NEWEST: signed_checkpoint(listed)})
    before = other.read_bytes()
    with pytest.raises(UsageError, match=r"checkpoint\.json cannot be read \(ValueError\)"):
        execute_in(folder, tiny("scaffold-exp", 6), client_store="disk")
    assert other.read_bytes() == before


def _parts(listed: dict[str, Any]) -> list[dict[str, Any]]:
    layers = listed["slots"]["layers"] if listed["slots"] else []
    return [listed["model"], *(part for _, _, part in listed["earlier"]), *layers]


@fuzz(120)
def test_archived_runs(
    runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    folder = tmp_path_factory.getbasetemp()
    run = load_run(put(folder / "whole", runs["finished"], {}))
    described, table = texts(run)
    kind = draw.choice(["toml", "csv", "forged toml", "forged csv"])
    raw = {"toml": described.encode(), "csv": table.encode()}
    if kind in raw:
        raw[kind] = mutated(draw, raw[kind])
    else:
        tree = {name: each for name, each in tomllib.loads(described).items() if name != "sha256"}
        if kind == "forged toml":
            tree = toml(forged(draw, tree))
        else:
            raw["csv"] = mutated(draw, raw["csv"])
        if isinstance(tree, dict):
            with suppress(UnicodeDecodeError):
                text = json.dumps(tree, sort_keys=True, default=str) + raw["csv"].decode()
                tree = {**tree, "sha256": hashlib.sha256(text.encode()).hexdigest()}
            raw["toml"] = (HEAD + tomli_w.dumps(tree)).encode()
    for ending, content in raw.items():
        (folder / f"archived.{ending}").write_bytes(content)
    harmless(lambda: read(folder / "archived.toml"))
