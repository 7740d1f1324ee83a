"""Replica groups of torchft on this machine: a lighthouse, and one process per replica group.

python -m tests.outer.replicas FILE CASE...

FILE.REPLICA gets, by case, the rounds and weights of a replica: REPLICA is 0 or 1. In the case
"killed" replica 1 kills itself in the middle of an all-reduce and is started again; the other one
continues alone until both have synchronised some more rounds.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.outer import OuterOptimizer

REPLICAS, STEPS, ROUNDS = 2, 3, 4
KILLED_IN, ROUNDS_AFTER = 2, 3  # round in which a replica dies; rounds after it has recovered
EXP = fx.ExP(eps=0.01, clamp=False)


@dataclass(frozen=True)
class Case:
    """Training with torchft.

    Attributes:
        rule: the outer rule; without one, torchft's own manager.
        inner: makes the inner optimizer.
        parts: number of fragments of the model, which synchronise in turn.
        local_sgd: use torchft's LocalSGD and not its DiLoCo.
        nan: round in which the update of replica 1 is not finite, once.
        init_sync: let all replicas but one discard their first steps.
    """

    rule: fx.ServerRule | None
    inner: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.3)
    parts: int = 1
    local_sgd: bool = False
    nan: int | None = None
    init_sync: bool = False


CASES = {
    "DiLoCo": Case(EXP, lambda params: torch.optim.AdamW(params, lr=0.05)),
    "local SGD": Case(EXP),
    "momentum": Case(fx.MomentumExP(eps=0.01, beta=0.5)),
    "average": Case(fx.Average()),
    "torchft's LocalSGD": Case(None, local_sgd=True),
    "LocalSGD by mistake": Case(EXP, local_sgd=True),
    "fragments": Case(EXP, parts=2),
    "not finite": Case(fx.MomentumExP(eps=0.01, beta=0.5), nan=2),
    "init_sync": Case(EXP, init_sync=True),
    "killed": Case(fx.MomentumExP(eps=0.01, beta=0.5)),
}


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def fragments(model: nn.Sequential, parts: int) -> list[nn.Module]:
    return [model] if parts == 1 else [model[0], model[2]]


def inner_step(
    model: nn.Module, inner: torch.optim.Optimizer, replica: int, round: int, step: int
) -> None:
    """Take a step on examples that replica, round and step determine."""
    draw = torch.Generator().manual_seed(1000 * replica + 10 * round + step)
    x = torch.randn(8, 3, generator=draw, dtype=torch.float64)
    y = torch.sin(3 * x[:, :1] + replica)
    inner.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    inner.step()


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def states(outers: list[OuterOptimizer]) -> list[Tensor]:
    values = [state for outer in outers for state in outer.state.values()]
    return [state[name].clone() for state in values for name in sorted(state)]


def wait_for_all(path: str, replica: int) -> None:
    """Wait until the managers of all replicas run, so that the first quorum has all of them."""
    Path(f"{path}.started{replica}").touch()
    while not all(Path(f"{path}.started{other}").exists() for other in range(REPLICAS)):
        time.sleep(0.05)


def train(
    name: str, replica: int, lighthouse: str, path: str, is_restarted: bool
) -> dict[str, Any]:
    """Train a case as one replica; return a row per round, and the weights at the end."""
    from torch._C._distributed_c10d import TCPStore
    from torchft.local_sgd import DiLoCo, LocalSGD
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    from fedexp.outer.torchft import OuterManager

    case, model, store = CASES[name], build_model(), TCPStore("localhost", 0, is_master=True)
    inner = case.inner(model.parameters())
    parts = fragments(model, case.parts)
    outers = [OuterOptimizer(part.parameters(), case.rule or EXP) for part in parts]
    dies = name == "killed" and replica == 1 and not is_restarted

    class Dying(OuterManager):
        def allreduce(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
            if dies and self.current_step() == KILLED_IN and len(self._sq_norms) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().allreduce(tensor, *args, **options)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = (Manager if case.rule is None else Dying)(
        *(() if case.rule is None else outers),
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1 if name == "killed" else REPLICAS,
        use_async_quorum=False,
        init_sync=case.init_sync,
        timeout=timedelta(seconds=20),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"{name}_{replica}",
    )
    wait_for_all(f"{path}.{name}", replica)
    if case.local_sgd:
        context = LocalSGD(manager, model, inner, STEPS)
    else:
        context = DiLoCo(manager, parts, inner, outers, STEPS * case.parts)
    rows: list[dict[str, Any]] = []
    last, spoils = math.inf if name == "killed" else ROUNDS, case.nan is not None and replica == 1
    error = ""
    with context, suppress(fx.UsageError):
        while manager.current_step() < last:
            round, before = manager.current_step(), [weights(model), *states(outers)]
            for step in range(STEPS):
                if step == STEPS - 1 and spoils and round == case.nan:
                    spoils = False
                    with torch.no_grad():
                        next(model.parameters()).fill_(torch.nan)
                try:
                    inner_step(model, inner, replica, round, step)
                except fx.UsageError as raised:
                    error = str(raised)
                    raise
            committed = manager.current_step() != round
            outer = outers[(manager.current_step() - 1) % case.parts]
            rows.append({"round": manager.current_step(), "committed": committed})
            after = [weights(model), *states(outers)]
            if not committed:
                rows[-1]["unchanged"] = all(map(torch.equal, before, after))
            rows[-1] |= {"metrics": dict(outer.metrics), "weights": after[0]}
            if name == "killed" and outer.metrics.get("dropped") == 1:
                last = manager.current_step() + ROUNDS_AFTER
            elif last == math.inf:
                time.sleep(0.1)  # of a round of one that is alone
    with ExitStack() as averaged:
        for outer in outers:
            averaged.enter_context(outer.averaged_parameters())
        output = weights(model)
    manager.shutdown(wait=False)
    return {"rows": rows, "output": output, "error": error}


def supervise(path: str, names: list[str]) -> None:
    """Start a lighthouse for each case and the replicas; start the killed one again."""
    from torchft.coordination import LighthouseServer

    lighthouses = [
        LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1 if name == "killed" else REPLICAS,
            join_timeout_ms=20000,
            heartbeat_timeout_ms=5000,
        )
        for name in names
    ]
    ports = [lighthouse.address().rpartition(":")[2] for lighthouse in lighthouses]

    def start(replica: int, restarted: str = "") -> subprocess.Popen[bytes]:
        works = [word for pair in zip(names, ports, strict=True) for word in pair]
        command = [sys.executable, "-m", "tests.outer.replicas", "--replica", str(replica)]
        return subprocess.Popen([*command, path, restarted, *works])

    processes = [start(replica) for replica in range(REPLICAS)]
    if names == ["killed"]:
        assert processes[1].wait() == -signal.SIGKILL
        processes[1] = start(1, restarted="yes")
    assert [process.wait() for process in processes] == [0] * REPLICAS


if __name__ == "__main__":
    socket.gethostname = lambda: "localhost"  # the address that torchft advertises
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if sys.argv[1] == "--replica":
        replica, path, restarted, *works = sys.argv[2:]
        results = {
            name: train(name, int(replica), f"http://127.0.0.1:{port}", path, bool(restarted))
            for name, port in zip(works[::2], works[1::2], strict=True)
        }
        torch.save(results, f"{path}.{replica}")
    else:
        supervise(sys.argv[1], sys.argv[2:])
