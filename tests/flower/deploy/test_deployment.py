"""One SuperLink and three SuperNodes over TLS, as real processes: equal numbers, and every fault.

The tests share one federation and run in the order they stand in. The one that kills a node is the
last: the SuperLink lists it beside its successor for a minute.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flower.deploy.federation import ALL, PATIENCE, Deployment, simulated, until

COMPLETED, FAILED = "finished:completed", "finished:failed"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("federation"), nodes=3) as deployment:
        yield deployment
    assert not list(deployment.processes.family()), "processes were left behind"


@pytest.fixture
def timeout(federation: Deployment) -> float:
    """Long enough for clients that are well, by what a round took here before."""
    seen = [row["seconds"] for row in federation.rows("equal")]
    return 10.0 + 3 * max(seen, default=20.0)


def test_the_rounds_of_the_simulator_and_spoilt_replies_left_out(federation: Deployment) -> None:
    """SCAFFOLD's rounds too: see the test of a SuperLink that is restarted."""
    faults = "2:1:nan 2:2:shape 3:1:missing 3:2:raise"
    status, log = federation.go("equal", rounds=3, faults=faults)
    assert status == COMPLETED, log
    federation.assert_same("equal", simulated("fedexp", [ALL, (0,), (0,)]))
    assert [row["dropped"] for row in federation.rows("equal")] == [0, 2, 2]
    for reason in ("not finite", "has shape", "no array", "raises on purpose"):
        assert reason in log


def test_secure_aggregation_gives_the_step_size_of_the_plain_round(federation: Deployment) -> None:
    status, log = federation.go("secure", rounds=1, secure=True, timeout=PATIENCE)
    assert status == COMPLETED, log
    (row,) = federation.rows("secure")
    (plain,) = simulated("fedexp", [ALL])
    assert row["server_lr"] == pytest.approx(plain.server_lr, rel=1e-3)
    assert row["clients"] == 3


def test_too_few_nodes_end_the_run_and_say_how_many_are_needed(federation: Deployment) -> None:
    status, log = federation.go("few", min_nodes=5, timeout=5.0)
    assert status == FAILED
    assert "3 of 5 nodes" in log
    assert federation.rows("few") == []


def test_a_superlink_killed_and_restarted(federation: Deployment) -> None:
    """SCAFFOLD resumes too: the clients' control variates belong to the study, not to the run.

    The SuperLink is killed once all nodes have the messages of the second round: one that waits
    for the content of a message would do so for a minute.
    """
    config = {"algorithms": "scaffold-exp", "rounds": 2}
    before = federation.received()
    federation.begin("resumed", **config)
    messages = 3  # the nodes' names, and two rounds
    until(lambda: federation.received() >= before + messages, "a second round")
    assert federation.has_checkpoint("resumed", "scaffold-exp")
    federation.processes.kill("superlink")
    federation.processes.kill("run")
    assert len(federation.rows("resumed", "scaffold-exp")) == 1
    federation.start_superlink()
    status, log = federation.go("resumed", **config)
    assert status == COMPLETED, log
    assert "resuming" in log
    federation.assert_same("resumed", simulated("scaffold-exp", [ALL] * 2), "scaffold-exp")


def test_a_supernode_and_a_client_process_killed_in_a_round(
    federation: Deployment, timeout: float
) -> None:
    """Node 1 is killed and started again, the ClientApp of node 2 dies: the round ends without
    them by its timeout. The next one has node 1 again, and node 2 unless it is passed over."""
    before = federation.received(1)
    faults = "1:1:hang 1:2:exit"
    stream = federation.begin("killed", rounds=2, faults=faults, timeout=timeout, min_nodes=2)
    until(lambda: federation.received(1) > before, "node 1 to train")
    federation.processes.kill("node-1")
    federation.start_node(1)
    status, log = federation.wait(stream, PATIENCE)
    assert status == COMPLETED, log
    first, second = federation.rows("killed")
    assert first["seconds"] < 2 * timeout
    assert first["dropped"] + first["unanswered"] == 2
    back = {2: (0, 1), 3: ALL}[second["clients"]]
    federation.assert_same("killed", simulated("fedexp", [(0,), back]))
