"""What has been released, on disk: a client's own budget of noised updates, and a run's account.

A release is written down before it is made. Neither a restart nor a message of the other side can
take it back: Flower's `context.state` ends with the SuperNode, and a promise must not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context

from fedexp.errors import UsageError, require
from fedexp.flower.client_store import file_name, state_root
from fedexp.flower.identity import own_name
from fedexp.privacy import Ledger, LocalPrivacy, Release
from fedexp.runs.atomic import sync_folder, telling, write_bytes
from fedexp.runs.foreign import is_count, parse_json

Releases = Mapping[Release, int]
FILE = "released.json"
FOLDER = ".privacy"  # no study can have this name: names of studies begin with a letter or digit


@dataclass(frozen=True)
class Budget:
    """How many noised updates a client may release, and the file in which it counts them.

    The client counts for itself: nothing that a server sends, neither the name of a run nor the
    node's id, decides where or what is counted. All apps on a client share one count unless they
    name different accounts, which is right for data that have nothing in common.

    Args:
        folder: of the account; it exists from the first release on.
        release: what one update costs.
        rounds: how many such updates may be released.
    """

    folder: Path
    release: Release
    rounds: int

    @classmethod
    def of(cls, privacy: LocalPrivacy, account: str, context: Context) -> Budget:
        """Return the budget of this client under its own settings."""
        assert privacy.rounds is not None
        folder = state_root(context) / FOLDER / file_name(own_name(context)) / file_name(account)
        return cls(folder, privacy.mechanism().plan(1, 1), privacy.rounds)

    def spend(self) -> None:
        """Count an update, or refuse it; before the training: what fails afterwards is charged too.

        Gaussian releases compose by adding 1 / z², so releases with other noise count as well. A
        count that is missing or cannot be read is no reason to release more.
        """
        with telling(self.folder), _locked(self.folder.parent.parent):
            spent = self._spent()
            after = sum(count * _cost(each) for each, count in spent.items()) + _cost(self.release)
            require(
                after <= self.rounds * _cost(self.release) * (1 + 1e-9),
                f"this client has taken part in {sum(spent.values())} rounds, all that its "
                "privacy budget allows",
            )
            self._write({**spent, self.release: spent.get(self.release, 0) + 1})

    def _spent(self) -> Releases:
        if not self.folder.exists():
            return {}
        try:
            return _read(self.folder / FILE)
        except UsageError as error:
            raise UsageError(
                "the count of this client's releases is missing or cannot be read, so its privacy "
                f"budget is taken as spent; restore {FILE} in {FOLDER} of its fedexp-state folder"
            ) from error

    def _write(self, releases: Releases) -> None:
        """Write the count; a new account appears with its file in it, or not at all."""
        if self.folder.exists():
            _write(self.folder / FILE, releases)
            return
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.folder.with_name(f".{self.folder.name}.new")
        fresh.mkdir(mode=0o700, exist_ok=True)
        _write(fresh / FILE, releases)
        os.rename(fresh, self.folder)
        sync_folder(self.folder.parent)


def open_ledger(path: Path, reported: int) -> Ledger:
    """Open the account of a run; every charge is written to its file before it counts.

    Args:
        path: of the file.
        reported: how many rounds of the run have reported a cost; the file must know them all.
    """
    releases = _read(path) if path.exists() or reported else {}
    require(
        sum(releases.values()) >= reported,
        f"{path} has fewer releases than the run has private rounds, so what was spent is not "
        "known; restore it, or begin again in another folder with a budget of its own",
    )
    return Ledger(releases, lambda after: _write(path, after))


def _read(path: Path) -> dict[Release, int]:
    """Read the releases of a file; raise `UsageError` for one that is missing or damaged."""
    try:
        rows = parse_json(path.read_bytes())["releases"]
        return {_release(row): _count(row["count"]) for row in rows}
    except (OSError, ArithmeticError, ValueError, LookupError, TypeError, UsageError) as error:
        raise UsageError(
            f"{path} does not say what was released ({type(error).__name__}), so what is left of "
            "the privacy budget is not known; restore it, or begin again in another folder"
        ) from error


def _release(row: Mapping[str, Any]) -> Release:
    clients, cohort = _count(row["clients"]), _count(row["cohort"])
    return Release(float(row["noise_multiplier"]), row["sampling"], clients, cohort)


def _count(value: Any) -> int:
    if not is_count(value, 1):
        raise ValueError("no number of clients or releases")
    return int(value)


def _cost(release: Release) -> float:
    """Return 1 / z², infinite where that is beyond the range of numbers."""
    inverse = 1.0 / release.noise_multiplier
    return inverse * inverse


def _write(path: Path, releases: Releases) -> None:
    rows = [{**asdict(release), "count": count} for release, count in releases.items()]
    data = json.dumps({"releases": rows}, indent=2, allow_nan=False) + "\n"
    with telling(path.parent):
        write_bytes(path, data.encode(), mode=0o600)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of all accounts below a folder: processes of one client count one by one."""
    try:
        import fcntl
    except ImportError:
        raise UsageError("a privacy budget needs a system with file locks; use another") from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
