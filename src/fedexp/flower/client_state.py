"""Who a client is, in a way that survives a restart of its node.

What a client keeps between rounds (SCAFFOLD's c_i), on its own disk.

Flower's `context.state` lives in the memory of the SuperNode and ends with it. Here every round
that a client trains in leaves a file, written at once and readable by its owner only:

    FOLDER / STUDY / CLIENT / ROUND.safetensors

A state counts only once the server has used the reply it belongs to. So the file of the last round
that the server accepted stays beside that of the newest one, and the server's next message decides
between them. A client can therefore never be ahead of its server: not after a reply that was lost,
late or refused, and not after the server went back to its checkpoint.
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
from fedexp.runs.checkpoint import from_bytes, to_bytes
from fedexp.runs.files import telling, write_bytes

PARTITION = "partition-id"
QUERY = "fedexp"  # the server asks with a message of type "query.fedexp"


def client_name(context: Context) -> str:
    """The name of this client: `fedexp-client` or `partition-id` of its node, else the node's id.

    A node gets a new id when it is restarted, unless it signs in with a key of its own.

    >>> client_name(Context(1, 77, {"partition-id": 3}, RecordDict(), {}))
    '3'
    """
    return _configured(context) or f"node-{context.node_id}"


def own_name(context: Context) -> str:
    """Return the client's name by its node's own configuration; one name for all that have none.

    The SuperLink draws the ids of nodes, so nothing that must hold against the server may depend
    on one.

    >>> own_name(Context(1, 77, {"partition-id": 3}, RecordDict(), {}))
    '3'
    >>> own_name(Context(1, 77, {}, RecordDict(), {}))
    'client'
    """
    return _configured(context) or "client"


def _configured(context: Context) -> str | None:
    for key in ("fedexp-client", PARTITION):
        if key in context.node_config:
            return str(context.node_config[key])
    return None


def partition_of(context: Context, clients: int) -> int:
    """Which of the clients of a federation this node trains."""
    told = context.node_config.get(PARTITION)
    if not isinstance(told, int):
        raise UsageError(
            "the node has no partition-id; start it with --node-config 'partition-id=0' "
            f"(one number from 0 to {clients - 1} for each node)"
        )
    require(
        0 <= told < clients,
        f"partition-id is {told}, but the federation has the clients 0 to {clients - 1}",
    )
    return told


def identify(app: ClientApp) -> None:
    """Let a ClientApp tell the server who it is: one line, `fedexp.flower.identify(app)`.

    With it the server draws the same cohorts whatever ids the nodes happen to get, and knows a
    client again after its node was restarted. Nothing else is told than the name.
    """
    app.query(QUERY)(_answer)


def _answer(message: Message, context: Context) -> Message:
    told = ConfigRecord({"client": client_name(context)})
    partition = context.node_config.get(PARTITION)
    if isinstance(partition, int):
        told[PARTITION] = partition
    return Message(RecordDict({"fedexp": told}), reply_to=message)


SUFFIX = ".safetensors"
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


@dataclass(frozen=True)
class ClientStore:
    """The states of one client in one study, by the round they come from."""

    folder: Path

    @classmethod
    def of(cls, root: Path, study: str, client: str) -> ClientStore:
        return cls(root / file_name(study) / file_name(client))

    def rounds(self) -> list[int]:
        """The rounds there are states of, in increasing order."""
        stems = [path.stem for path in self.folder.glob(f"*{SUFFIX}")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def load(self, round: int) -> Tensors | None:
        """The state after a round; None where there is none, or none that can be read."""
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
        """Keep the state after a round that began from the one after round `base`.

        Of the rounds before it only `base` can still be asked for; the others are removed. Later
        ones are not touched: a slow client may still be busy with a round that is long over.
        """
        with telling(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(self._path(round), to_bytes(state), mode=0o600)
            for other in self.rounds():
                if other < round and other != base:
                    self._path(other).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"{round}{SUFFIX}"


def state_root(context: Context) -> Path:
    """Where states are kept: `fedexp-state` of the node, $FEDEXP_STATE, or in the user's home."""
    told = context.node_config.get("fedexp-state") or os.environ.get("FEDEXP_STATE")
    if told:
        require(isinstance(told, str), f"fedexp-state must be a folder, not {told!r}")
        return Path(str(told)).expanduser()
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "fedexp"


def file_name(name: str) -> str:
    """A name that is safe in a path, whoever sent it: itself where it is plain, else its hash.

    >>> file_name("hospital-3"), len(file_name("../../etc/passwd"))
    ('hospital-3', 64)
    """
    if PLAIN_NAME.fullmatch(name):
        return name
    return hashlib.sha256(name.encode()).hexdigest()
