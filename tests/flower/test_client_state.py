"""Client state and client names survive restarts of nodes and of the server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedexp as fx
from fedexp.errors import UsageError
from fedexp.flower import initial_arrays, report_client_id
from fedexp.flower.client_state import ClientStateFolder, client_name, state_root
from tests.flower.helpers.fake_grid import FakeGrid
from tests.flower.helpers.rounds import Rounds
from tests.flower.helpers.user_app import simulated_app, user_app
from tests.helpers.problems import classes_task, least_squares

TASK = least_squares(clients=3, dim=6)
APP = simulated_app(TASK)


def scaffold_rounds(study: str = "study", seed: int = 0) -> Rounds:
    """SCAFFOLD over three nodes, whose ids follow from a seed."""
    grid = FakeGrid(APP, 3, seed=seed)
    return Rounds(grid, fx.scaffold(), initial_arrays(TASK), **{"fedexp.api": study})


def after(rounds: Rounds) -> Tensor:
    state = rounds.server.state
    return torch.cat([state.params, state.broadcast["control"]])


def run(rounds: Rounds, count: int) -> Rounds:
    for _ in range(count):
        rounds.run(range(3))
    return rounds


def test_a_restart_of_every_node_changes_nothing() -> None:
    rounds = run(scaffold_rounds(), 2)
    rounds.grid = FakeGrid(APP, 3, seed=1)  # other node ids, empty contexts
    run(rounds, 2)
    torch.testing.assert_close(after(rounds), after(run(scaffold_rounds("reference"), 4)))


def test_without_the_folder_a_restart_would_be_noticed(
    state_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = run(scaffold_rounds(), 2)
    for path in (state_folder / "study" / "1").iterdir():
        path.unlink()
    with caplog.at_level(logging.WARNING, "flwr"):
        run(rounds, 2)
    assert "round 2 is not in" in caplog.text
    assert "fedexp-state" in caplog.text
    assert len(caplog.records) == 1  # of one client, once
    assert not torch.allclose(after(rounds), after(run(scaffold_rounds("reference"), 4)))


@settings(max_examples=12)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=5, max_size=5))
def test_a_reply_that_is_not_used_leaves_no_trace(used: list[list[bool]]) -> None:
    """As if those clients had not taken part in that round."""
    study = "-".join(str(int(bit)) for row in used for bit in row)
    asked_all, asked_some = scaffold_rounds(f"all-{study}"), scaffold_rounds(f"some-{study}")
    for bits in used:
        chosen = [k for k in range(3) if bits[k]]
        asked_all.run(range(3), accepted=chosen)
        asked_some.run(chosen)
    torch.testing.assert_close(after(asked_all), after(asked_some), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("names_round", [True, False])
def test_a_server_that_returns_to_its_checkpoint(names_round: bool) -> None:
    rounds = scaffold_rounds()
    rounds.sends_accepted = names_round
    run(rounds, 2)
    checkpoint, accepted = rounds.server.state, dict(rounds.accepted)
    run(rounds, 1)  # lost with the server
    rounds.server.state, rounds.accepted = checkpoint, accepted
    run(rounds, 2)
    torch.testing.assert_close(after(rounds), after(run(scaffold_rounds("reference"), 4)))


def test_runs_side_by_side_do_not_mix() -> None:
    one, other = scaffold_rounds("one"), scaffold_rounds("other")
    other.grid = one.grid
    for round in range(3):
        one.run(range(3))
        other.run([round])
    torch.testing.assert_close(after(one), after(run(scaffold_rounds("reference"), 3)))


def test_a_new_run_under_an_old_name_starts_with_fresh_state() -> None:
    expected = after(run(scaffold_rounds(), 3))
    torch.testing.assert_close(after(run(scaffold_rounds(), 3)), expected)


def test_a_server_that_names_no_round_gets_the_newest_earlier_state() -> None:
    rounds = scaffold_rounds()
    rounds.sends_accepted = False
    torch.testing.assert_close(after(run(rounds, 4)), after(run(scaffold_rounds("reference"), 4)))


def test_a_damaged_file_is_as_good_as_none(state_folder: Path) -> None:
    run(scaffold_rounds(), 2)
    store = ClientStateFolder.of(state_folder, "study", "0")
    path = store.folder / "2.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    assert store.load(2) is None
    assert store.load(1) is not None


def test_two_files_a_client_for_their_owner_only(state_folder: Path) -> None:
    run(scaffold_rounds(), 4)
    files = sorted((state_folder / "study" / "0").iterdir())
    assert [path.name for path in files] == ["3.safetensors", "4.safetensors"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert files[0].parent.stat().st_mode & 0o777 == 0o700


def test_a_slow_round_does_not_remove_a_later_one(state_folder: Path) -> None:
    store = ClientStateFolder.of(state_folder, "study", "0")
    for round, base in ((5, 0), (7, 5), (6, 5)):
        store.save({"control": torch.full((1,), float(round))}, round, base)
    assert store.rounds() == [5, 6, 7]
    store.save({"control": torch.zeros(1)}, 9, 7)
    assert store.rounds() == [7, 9]


def test_names_from_a_server_stay_inside_the_folder(state_folder: Path) -> None:
    for name in ("../../x", "/etc", "..", "", "a/b", "x" * 300):
        folder = ClientStateFolder.of(state_folder, name, name).folder
        assert folder.resolve().is_relative_to(state_folder.resolve())
        assert len(folder.relative_to(state_folder).parts) == 2


def test_where_states_are_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node = Context(1, 7, {"fedexp-state": "~/here"}, RecordDict(), {})
    assert state_root(node) == Path.home() / "here"
    nowhere = Context(1, 7, {}, RecordDict(), {})
    assert state_root(nowhere) == tmp_path / "client-state"
    monkeypatch.delenv("FEDEXP_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_root(nowhere) == tmp_path / "fedexp"


def test_states_of_another_model_are_refused() -> None:
    run(scaffold_rounds(), 1)
    task = classes_task()
    rounds = Rounds(FakeGrid(user_app(task), 3), fx.scaffold(), initial_arrays(task))
    rounds.accepted = {0: 1}
    with pytest.raises(AssertionError, match="belongs to another model; remove it"):
        rounds.run([0])


def test_a_folder_that_cannot_be_written_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ClientStateFolder.of(tmp_path / "file", "study", "0")
    with pytest.raises(UsageError, match="cannot write to"):
        store.save({"control": torch.zeros(1)}, 1, 0)


def test_a_file_that_cannot_be_read_raises(tmp_path: Path) -> None:
    store = ClientStateFolder.of(tmp_path, "study", "0")
    (store.folder / "1.safetensors").mkdir(parents=True)
    with pytest.raises(UsageError, match="cannot read"):
        store.load(1)


def test_a_state_that_is_not_finite_is_not_stored(state_folder: Path) -> None:
    rounds = run(scaffold_rounds(), 1)
    model = rounds.server.state
    model.params[0] = torch.inf
    rounds.run([0], accepted=[])
    assert ClientStateFolder.of(state_folder, "study", "0").rounds() == [1]


def test_plain_rules_write_nothing(state_folder: Path) -> None:
    for algorithm in (fx.fedexp(), fx.fedprox()):
        run(Rounds(FakeGrid(APP, 3), algorithm, initial_arrays(TASK)), 2)
    assert not state_folder.exists()


def answer(config: dict[str, Any]) -> tuple[ConfigRecord, int]:
    app = ClientApp()
    report_client_id(app)
    grid = FakeGrid(app, [config])
    node = grid.nodes[0].node_id
    query = Message(RecordDict(), dst_node_id=node, message_type="query.fedexp")
    (reply,) = grid.send_and_receive([query])
    return reply.content.config_records["fedexp"], node


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"partition-id": 3, "secret": "x"}, {"client": "3", "partition-id": 3}),
        (
            {"partition-id": 3, "fedexp-client": "ward-7"},
            {"client": "ward-7", "partition-id": 3},
        ),
    ],
)
def test_a_client_reports_its_name_and_nothing_else(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert dict(answer(config)[0]) == expected


def test_a_node_without_a_partition_reports_its_id() -> None:
    reported, node = answer({})
    assert dict(reported) == {"client": f"node-{node}"}
    assert client_name(Context(9, node, {}, RecordDict(), {})) == f"node-{node}"
