"""`Budget`: how many noised updates a client has let out, on its own disk.

Flower's `context.state` ends with the SuperNode, and a promise about all rounds must not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context

from fedexp.errors import UsageError, require
from fedexp.flower.client_store import ClientStore, state_root
from fedexp.flower.identity import client_name
from fedexp.runs.atomic import telling, write_bytes

FILE = "released.json"


@dataclass(frozen=True)
class Budget:
    """The rounds that a client may take part in, and the file that counts them."""

    path: Path
    rounds: int

    @classmethod
    def of(cls, rounds: int, told: Mapping[str, Any], context: Context) -> Budget:
        """The budget of this client in the study that the server's config tells."""
        study = str(told.get("fedexp.study", context.run_id))
        store = ClientStore.of(state_root(context), study, client_name(context))
        return cls(store.folder / FILE, rounds)

    def spend(self) -> None:
        """Count a round, or refuse it; before the training: what fails afterwards is charged too.

        A count that cannot be read or kept is no reason to let out more.
        """
        done = self._done()
        require(
            done < self.rounds,
            f"this client has taken part in {done} rounds, all that its privacy budget allows",
        )
        with telling(self.path.parent):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(self.path, json.dumps({"rounds": done + 1}).encode(), mode=0o600)

    def _done(self) -> int:
        try:
            return int(json.loads(self.path.read_bytes())["rounds"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                "the count of this client's rounds cannot be read, so its privacy budget is taken "
                f"as spent; mend {FILE} in its fedexp-state folder"
            ) from error
