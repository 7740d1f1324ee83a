"""A client's name and its state between rounds, both of which survive a restart of its node.

Flower's `context.state` is in the memory of the SuperNode and ends with it. Here the state of a
client (SCAFFOLD's c_i) is stored on its disk, one file per round, readable by its owner only:

    FOLDER / STUDY / CLIENT / ROUND.safetensors

A state counts only once the server has used the reply it belongs to. So the file of the last round
that the server accepted is stored beside that of the newest one, and the server's next message
decides between them. A client can therefore never be ahead of its server: not after a reply that
was lost, late or refused, and not after the server returned to its checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedexp.client import Tensors
from fedexp.errors import UsageError, require
from fedexp.storage import disk_errors, from_bytes, to_bytes, write_bytes

PARTITION = "partition-id"
QUERY = "fedexp"  # the server queries nodes by messages of type "query.fedexp"
SUFFIX = ".safetensors"
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def report_client_id(app: ClientApp) -> None:
    """Let a ClientApp report its client id to the server: `fedexp.flower.report_client_id(app)`.

    With it the server draws the same cohorts whatever ids the nodes happen to get, and recognises a
    client after a restart of its node. Nothing but the name and the partition is reported.
    """
    app.query(QUERY)(_reply_client_id)


def _reply_client_id(message: Message, context: Context) -> Message:
    record = ConfigRecord({"client": client_name(context)})
    partition = context.node_config.get(PARTITION)
    if isinstance(partition, int):
        record[PARTITION] = partition
    return Message(RecordDict({"fedexp": record}), reply_to=message)


def client_name(context: Context) -> str:
    """Return the name of this client: `fedexp-client` or `partition-id` of its node, else its id.

    A node gets a new id when it restarts, unless it authenticates with a key.

    >>> client_name(Context(1, 77, {"partition-id": 3}, RecordDict(), {}))
    '3'
    """
    return _node_name(context) or f"node-{context.node_id}"


def configured_name(context: Context) -> str:
    """Return the client's name by its node's configuration; one name for all that have none.

    The SuperLink draws the ids of nodes, so what must hold against the server cannot depend on one.

    >>> configured_name(Context(1, 77, {"partition-id": 3}, RecordDict(), {}))
    '3'
    >>> configured_name(Context(1, 77, {}, RecordDict(), {}))
    'client'
    """
    return _node_name(context) or "client"


def _node_name(context: Context) -> str | None:
    for key in ("fedexp-client", PARTITION):
        if key in context.node_config:
            return str(context.node_config[key])
    return None


def partition_of(context: Context, clients: int) -> int:
    """Return which of so many clients this node is, by its `partition-id`."""
    partition = context.node_config.get(PARTITION)
    if not isinstance(partition, int):
        raise UsageError(
            "the node has no partition-id; start it with --node-config 'partition-id=0' "
            f"(one number from 0 to {clients - 1} for each node)"
        )
    require(
        0 <= partition < clients,
        f"partition-id is {partition}, but the federation has the clients 0 to {clients - 1}",
    )
    return partition


@dataclass(frozen=True)
class ClientStateFolder:
    """The folder with the states of one client in one study, one file per round."""

    folder: Path

    @classmethod
    def of(cls, root: Path, study: str, client: str) -> ClientStateFolder:
        return cls(root / file_name(study) / file_name(client))

    def rounds(self) -> list[int]:
        """Return the rounds that have a stored state, in increasing order."""
        stems = [path.stem for path in self.folder.glob(f"*{SUFFIX}")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def load(self, round: int) -> Tensors | None:
        """Return the state after a round; None where there is none, or it cannot be read."""
        try:
            return from_bytes(self._path(round).read_bytes(), torch.device("cpu"))
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise UsageError(
                f"cannot read {self._path(round)}: {error.strerror}; give it to the user that the "
                "node runs as, or set fedexp-state"
            ) from error

    def save(self, state: Tensors, round: int, base: int) -> None:
        """Store the state after a round that started from the state of round `base`.

        Of earlier rounds only `base` can still be needed; the others are removed. Later rounds are
        not: a slow client may still be training in a round that is long over.
        """
        with disk_errors(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(self._path(round), to_bytes(state), mode=0o600)
            for other in self.rounds():
                if other < round and other != base:
                    self._path(other).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"{round}{SUFFIX}"


def state_root(context: Context) -> Path:
    """Return the folder of states: `fedexp-state` of the node, $FEDEXP_STATE, or one in the
    user's home."""
    folder = context.node_config.get("fedexp-state") or os.environ.get("FEDEXP_STATE")
    if folder:
        require(isinstance(folder, str), f"fedexp-state must be a folder, not {folder!r}")
        return Path(str(folder)).expanduser()
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "fedexp"


def file_name(name: str) -> str:
    """Return a name that is safe in a path: the name itself where it is plain, else its hash.

    >>> file_name("hospital-3"), len(file_name("../../etc/passwd"))
    ('hospital-3', 64)
    """
    if PLAIN_NAME.fullmatch(name):
        return name
    return hashlib.sha256(name.encode()).hexdigest()
