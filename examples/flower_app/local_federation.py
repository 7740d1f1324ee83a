"""A SuperLink and SuperNodes on this machine, over TLS, that do not outlive the block.

with LocalFederation(Path("out"), nodes=3) as federation:
    status, log = federation.run(Path("."), {"rounds": 5}, timeout=300)
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from certificates import make_certificates
from processes import Processes, program

HOST = "127.0.0.1"
CONNECTION = "local-federation"
START_SECONDS = 60.0
LINK, USER = "superlink", "run"  # the names of the processes; nodes are node-0, node-1, ...


class FederationError(RuntimeError):
    """A process did not start, or a run could not be followed to its end."""


class RunOutcome(NamedTuple):
    """How a run ended, e.g. `finished:completed`, and what it said."""

    status: str
    log: str


class LocalFederation:
    """One SuperLink and some SuperNodes. Everything they write is under `folder`.

    Args:
        folder: for certificates, logs, the database and Flower's own files.
        nodes: how many SuperNodes; with `simulation` how many simulated ones.
        simulation: no SuperNodes: the SuperLink simulates them with ray, without TLS.
    """

    def __init__(self, folder: Path, nodes: int = 3, simulation: bool = False) -> None:
        self.folder, self.nodes, self.simulation = folder.resolve(), nodes, simulation
        self.processes = Processes(self.folder)
        self.certificates = make_certificates(self.folder / "certificates", HOST)
        self.port = free_port()

    def __enter__(self) -> Self:
        for old in self.folder.glob("superlink.db*"):
            old.unlink()  # runs and nodes of an earlier life
        try:
            self.start_superlink()
            for number in range(0 if self.simulation else self.nodes):
                self.start_node(number)
        except BaseException:
            self.processes.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.processes.stop()

    def start_superlink(self) -> None:
        """Start the SuperLink; again with the same database and port where it has died."""
        files = self.certificates
        command = [
            "flower-superlink",
            *("--host", HOST, "--port", str(self.port)),
            *("--database", str(self.folder / "superlink.db")),
            "--disable-runtime-dependency-installation",
        ]
        if self.simulation:
            command += ["--insecure", "--simulation"]
        else:
            command += ["--ssl-ca-certfile", str(files.authority)]
            command += ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
        self._await_port(self.processes.start(LINK, command))
        self._write_connection()

    def start_node(self, number: int) -> None:
        """Start SuperNode `number`, whose partition has the same number."""
        state = self.folder / f"node-{number}" / "state"
        config = f'partition-id={number} num-partitions={self.nodes} fedexp-state="{state}"'
        command = [
            "flower-supernode",
            *("--superlink", f"{HOST}:{self.port}"),
            *("--root-certificates", str(self.certificates.authority)),
            *("--host", HOST, "--port", str(free_port())),
            *("--node-config", config),
        ]
        self.processes.start(f"node-{number}", command)

    def run(self, app: Path, config: Mapping[str, Any], timeout: float) -> RunOutcome:
        """Submit an app, wait until it ends, and return how it ended."""
        return self.wait(self.submit(app, config), timeout)

    def submit(self, app: Path, config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Submit an app and return the process that streams its log to `run.log`."""
        command = ["flwr", "run", str(app.resolve()), CONNECTION, "--stream"]
        for key, value in config.items():
            command += ["-c", f"{key}={json.dumps(value)}"]
        if self.simulation:
            resources = f"num-supernodes={self.nodes} client-resources-num-cpus=1"
            command += ["--federation-config", resources]
        return self.processes.start(USER, command, fresh_log=True)

    def wait(self, stream: subprocess.Popen[bytes], timeout: float) -> RunOutcome:
        """Wait until the log ends; `flwr run --stream` returns 0 even for a run that failed."""
        try:
            stream.wait(timeout)
        except subprocess.TimeoutExpired:
            self.processes.kill(USER)
            said = self.processes.log(USER)
            raise FederationError(f"the run did not end in time; it said:\n{said}") from None
        return RunOutcome(self.last_status(), self.processes.log(USER))

    def last_status(self) -> str:
        """How the newest run stands, e.g. `running` or `finished:failed`."""
        command = [program("flwr"), "list", CONNECTION, "--limit", "1", "--format", "json"]
        environment = self.processes.environment(USER)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        try:
            return str(json.loads(done.stdout)["runs"][0]["status"])
        except (ValueError, KeyError, IndexError):
            raise FederationError(f"`flwr list` failed: {done.stdout}{done.stderr}") from None

    def _write_connection(self) -> None:
        """Configure the address of the SuperLink for `flwr`, in its home and not in the user's."""
        authority = json.dumps(str(self.certificates.authority))
        trust = "insecure = true" if self.simulation else f"root-certificates = {authority}"
        home = self.folder / USER
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "{HOST}:{self.port}"\n{trust}\n'
        )

    def _await_port(self, link: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and link.poll() is None:
            with suppress(OSError), socket.create_connection((HOST, self.port), timeout=1):
                return
            time.sleep(0.1)
        raise FederationError(f"the SuperLink did not start:\n{self.processes.log(LINK)}")


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
