"""How a process recognises a torchrun job, and the devices that its ranks may use."""

from __future__ import annotations

import socket

import pytest
import torch

from fedexp.distributed import AgentLostError, check_device, current, group, launched
from fedexp.distributed.group import FORCED, VARIABLES, check_agent, local_world_size
from fedexp.errors import UsageError


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 1 of 2, both on this machine."""
    values = {**dict.fromkeys(VARIABLES, "1"), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(FORCED, raising=False)
    return monkeypatch


def test_a_torchrun_job_is_recognised(environment: pytest.MonkeyPatch) -> None:
    assert launched() == (1, 2)
    assert local_world_size() == 2
    assert current() is None  # nothing is joined yet


@pytest.mark.parametrize("name", VARIABLES)
def test_an_incomplete_environment_is_a_single_process(
    environment: pytest.MonkeyPatch, name: str
) -> None:
    environment.delenv(name)
    assert launched() is None


def test_one_rank_is_a_single_process_unless_forced(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RANK", "0")
    environment.setenv("WORLD_SIZE", "1")
    assert launched() is None
    environment.setenv(FORCED, "1")
    assert launched() == (0, 1)


def test_a_malformed_environment_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RANK", "one")
    with pytest.raises(UsageError, match="start with torchrun"):
        launched()


@pytest.mark.usefixtures("environment")
def test_ranks_do_not_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_device(None)
    check_device("cpu")
    with pytest.raises(UsageError, match="use --device cuda, not cuda:0"):
        check_device("cuda:0")
    with pytest.raises(UsageError, match=r"1 GPUs for 2 ranks; .* --nproc-per-node 1"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda")


def test_an_agent_whose_port_is_closed_has_ended(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(group, "AGENT_TIMEOUT", 0.2)
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.create_server(("127.0.0.1", 0)) as agent:
        environment.setenv("MASTER_PORT", str(agent.getsockname()[1]))
        check_agent()
    with pytest.raises(AgentLostError, match="start the same command again"):
        check_agent()
    environment.delenv("TORCHELASTIC_USE_AGENT_STORE")
    check_agent()  # rank 0 hosts the store, and may not have started yet
