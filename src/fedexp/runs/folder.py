"""`RunFolder`: the folder of a run, created, locked and checked, and its provenance.

`spec.toml` has the resolved options, `fingerprint.json` digests of data, model and code: the same
command with other content is another run, and is refused. `environment.json` records where the
numbers come from: machine, libraries, command, commits and the engine that trained. A folder that
an error left without a round is removed.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy
import torch

from fedexp import __version__, storage
from fedexp.engine import Record
from fedexp.errors import DamagedError, OtherContentError, UsageError, require, shown
from fedexp.experiment import Experiment
from fedexp.runs.checkpoint import BEFORE, NEWEST
from fedexp.runs.fingerprint import Fingerprint, fingerprint_of, joined
from fedexp.runs.records import RECORDS, is_count, read_rows, result_fault
from fedexp.runs.spec import HEAD, SPEC, Differences, check_same, is_run, read_spec, spec_text

PACKAGE = Path(__file__).resolve().parents[1]
GIT_SECONDS = 2.0  # after which git is given up
MOST_THREADS = 4096  # of a run
CHECKPOINT_FILES = (".json", ".safetensors", ".slots")
ENVIRONMENT, RESULT, MODEL, LOCK = "environment.json", "result.json", "model.safetensors", ".lock"
FINGERPRINT = "fingerprint.json"
RELEASES = "checkpoint-releases.json"  # the privacy budget spent: never removed with the run


class BusyError(UsageError):
    """Another process holds the folder of a run."""


class RunWarning(UserWarning):
    """Something about a stored run that its user should know."""


@dataclass(eq=False)
class RunFolder:
    """A run on the disk, locked by this process within the `with` block.

    The operating system holds the lock, so a process that is killed leaves none behind.

    Args:
        path: the folder.
        spec: the run's resolved spec; a folder with another one is refused.
        about: the content of `environment.json`, should the run begin now.
        head: the first line of `spec.toml`.
        fingerprint: digests of the content; a folder with others is refused. None neither checks
            nor stores any.
        restart: discard what the folder holds of the run, whatever its content.
        may_change: names of the spec with which a stored run may be continued otherwise, see
            `check_same`.

    Attributes:
        changes: what differs from the stored run; stored when the run is resumed.
    """

    path: Path
    spec: Mapping[str, Any]
    about: Mapping[str, Any]
    head: str = HEAD
    fingerprint: Fingerprint | None = None
    restart: bool = False
    may_change: Collection[str] = ()
    changes: Differences = field(default_factory=dict, init=False)
    _began: bool = field(default=False, init=False)
    _lock: IO[bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]

    @classmethod
    def of(cls, path: Path, experiment: Experiment, restart: bool = False) -> RunFolder:
        """Return the folder of a simulated run."""
        about, content = environment(experiment), fingerprint_of(experiment)
        return cls(path, experiment.spec, about, HEAD, content, restart)

    def __enter__(self) -> RunFolder:
        with storage.disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_other_files()
            self._lock = _locked(self.path)
        try:
            with storage.disk_errors(self.path):
                self._check_or_begin()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        failed = self._began and isinstance(error, UsageError)
        if failed and not (self.path / RELEASES).exists() and not read_rows(self.path):
            self._remove()
        if self._lock is not None:
            self._lock.close()

    def clear(self) -> None:
        """Discard all but the spec and the privacy budget spent.

        A process killed in here leaves the old run or none of it: files that refer to others are
        removed before them, and the old fingerprint is replaced last.
        """
        for name in (RESULT, BEFORE, NEWEST):
            (self.path / name).unlink(missing_ok=True)
        for path in self._own_files():
            if path.name not in (SPEC, LOCK, ENVIRONMENT, FINGERPRINT, RELEASES):
                path.unlink()
        self._describe()

    def threads(self) -> int:
        """Return the number of threads the run began with: it decides the rounding of sums."""
        number: Any = read_environment(self.path).get("threads")
        return int(number) if is_count(number, 1, MOST_THREADS) else torch.get_num_threads()

    def note_resumed(self, round: int) -> Differences:
        """Record that this process resumes the run after `round`, and with which changes.

        Returns the changes that apply from the next round on: also those of processes that were
        killed before they stored a round.
        """
        about = read_environment(self.path)
        again = {"round": round, "fedexp": __version__, "started": _now(), "command": command()}
        changed = {"changed": self.changes} if self.changes else {}
        about["resumed"] = [*_listed(about, "resumed"), again | changed | commits()]
        with storage.disk_errors(self.path):
            self._write_environment(about)
            if changed:
                storage.write_bytes(self.path / SPEC, spec_text(self.spec, self.head).encode())
        new: Differences = {}
        with suppress(AttributeError, LookupError, TypeError, ValueError):  # it was edited
            for entry in about["resumed"]:
                for name, (then, now) in entry.get("changed", {}).items():
                    if entry["round"] >= round:
                        new[name] = new.get(name, (then,))[0], now
        return {name: pair for name, pair in new.items() if pair[0] != pair[1]}

    def note_engine(self, record: Record) -> None:
        """Store the engine that trained a round, with its reason, unless that is stored already."""
        about = read_environment(self.path)
        engine = asdict(record.engine_choice) if record.engine_choice else None
        if about.get("engine") != engine:
            with storage.disk_errors(self.path):
                self._write_environment({**about, "engine": engine})

    def reopen(self) -> int | None:
        """Let a run that ended as diverged continue from its last checkpoint; return its round.

        One absurd update or evaluation ends a federation for good otherwise. A run that was
        reopened at that round before returns to the checkpoint before it, where there is one: the
        state in the newest may be the cause. None where the run did not diverge; one that is
        finished, and has another number of rounds now, continues too.
        """
        try:
            result = storage.parse_json((self.path / RESULT).read_bytes())
        except (OSError, ValueError):
            return None
        if result_fault(result) is not None:
            return None
        if result["status"] != "diverged":
            if "rounds" in self.changes:
                with storage.disk_errors(self.path):
                    (self.path / RESULT).unlink()
                    (self.path / MODEL).unlink(missing_ok=True)
            return None
        about = read_environment(self.path)
        at, before = (_round_of(self.path / name) for name in (NEWEST, BEFORE))
        with storage.disk_errors(self.path):
            if at in [entry.get("round") for entry in _listed(about, "reopened")] and before:
                os.replace(self.path / BEFORE, self.path / NEWEST)
                at = before
            (self.path / RESULT).unlink()
            ended = {"diverged_at": result.get("diverged_at"), "reason": result.get("reason")}
            again = {"round": at, "started": _now(), **ended}
            about["reopened"] = [*_listed(about, "reopened"), again]
            self._write_environment(about)
        return at

    def _write_environment(self, about: dict[str, Any]) -> None:
        """Write the environment without the arguments of Flower's processes, which hold tokens."""
        if self.spec.get("engine") == "flower":
            about = {name: value for name, value in about.items() if name != "command"}
            for entry in _listed(about, "resumed"):
                entry.pop("command", None)
        storage.write_json(self.path / ENVIRONMENT, about, mode=storage.PRIVATE)

    def _describe(self) -> None:
        self._write_environment(dict(self.about))
        if self.fingerprint is not None:
            storage.write_json(self.path / FINGERPRINT, self.fingerprint.to_json())
        else:
            (self.path / FINGERPRINT).unlink(missing_ok=True)

    def _refuse_other_files(self) -> None:
        """Accept a folder that is a run, or holds no more than what a killed process left."""
        others = set(self.path.iterdir()) - set(self._own_files())
        require(
            is_run(self.path) or not others,
            f"{self.path} is not empty and holds no run; choose another folder",
        )

    def _check_or_begin(self) -> None:
        for path in self.path.glob(".*.tmp"):
            path.unlink()  # its writer was killed
        if is_run(self.path):
            stored = read_spec(self.path)
            self.changes = check_same(stored, self.spec, self.path, self.may_change)
            if self.restart:
                self.clear()
                return
            warn_of_version(self.path)
            if self.fingerprint is None:
                return
            if any((self.path / name).exists() for name in (RESULT, NEWEST, BEFORE)):
                check_content(self.path, self.fingerprint)
            else:  # it was killed before its first checkpoint
                self._describe()
            return
        self._began = True
        self._describe()
        storage.write_bytes(self.path / SPEC, spec_text(self.spec, self.head).encode())

    def _own_files(self) -> list[Path]:
        names = {SPEC, ENVIRONMENT, FINGERPRINT, RESULT, MODEL, LOCK, RECORDS}
        return [
            path
            for path in self.path.iterdir()
            if path.name in names
            or (path.name.startswith("checkpoint") and path.suffix in CHECKPOINT_FILES)
            or (path.name.startswith(".") and path.suffix == ".tmp")
        ]

    def _remove(self) -> None:
        """Remove the files of a run that never had a round, and the folders made for it."""
        for path in self._own_files():
            path.unlink(missing_ok=True)
        with suppress(OSError):  # a folder in use by others stays
            for folder in self._made:
                folder.rmdir()


def environment(experiment: Experiment) -> dict[str, Any]:
    """Return the content of `environment.json`, with the metric that a report judges by."""
    task = experiment.problem
    return {
        **machine(experiment.train_device.type == "cuda"),
        "metric": task.metric,
        "goal": str(task.goal),
        "target": task.target,
    }


def machine(on_gpu: bool = False) -> dict[str, Any]:
    """Return this machine, its libraries, the command and the time."""
    return {
        "fedexp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "command": command(),
        "started": _now(),
        **commits(),
    }


def command() -> str:
    """Return the command of this process, with arguments only for `fedexp` itself.

    Other programs may have tokens and keys in theirs, Flower's processes among them, and a run
    folder is not a place for secrets.
    """
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path("python")
    is_ours = program.name == "fedexp" or program == PACKAGE / "__main__.py"
    return shlex.join([program.name, *(sys.argv[1:] if is_ours else [])])


def commits() -> dict[str, Any]:
    """Return the commits of fedexp, if it runs from a checkout, and of the working directory.

    Each with whether tracked files have been changed since. Empty without a repository or git.
    """
    return commits_of(PACKAGE, Path(os.path.abspath(os.curdir)))


@lru_cache(maxsize=4)
def commits_of(package: Path, here: Path) -> dict[str, Any]:
    """Return the commits of a package in a checkout, and of another folder; asks git once."""
    is_tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    top = _git(package, "rev-parse", "--show-toplevel") if is_tracked else None
    commits = _commit(package, "fedexp") if is_tracked else {}
    if _git(here, "rev-parse", "--show-toplevel") not in (None, top):
        commits |= _commit(here, "project")
    return {"git": commits} if commits else {}


def _commit(folder: Path, name: str) -> dict[str, Any]:
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {name: commit} | ({} if changed is None else {f"{name}_dirty": changed != ""})


def _git(folder: Path, *arguments: str) -> str | None:
    """Run git; return its output, or None where it fails. Runs no hook, and takes no lock."""
    words = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _listed(about: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the entries of a list in an environment, as far as they can be read."""
    entries = about.get(name)
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def read_environment(folder: Path) -> dict[str, Any]:
    """Return the content of `environment.json`; empty where it cannot be read: it is optional."""
    try:
        about = storage.finite(storage.parse_json((folder / ENVIRONMENT).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def warn_of_version(folder: Path) -> None:
    """Warn of a run that was started by another version of the package."""
    version = read_environment(folder).get("fedexp", __version__)
    if version != __version__:
        warnings.warn(
            f"{folder} was started with fedexp {shown(version)}; this is {__version__}, and its "
            "numbers may differ",
            RunWarning,
            stacklevel=2,
        )


def check_content(folder: Path, wanted: Fingerprint) -> None:
    """Refuse a run of other content."""
    changes = read_fingerprint(folder).differences(wanted)
    verb = "differs" if len(changes) == 1 else "differ"
    if changes:
        raise OtherContentError(f"{folder} holds a run of other content: {joined(changes)} {verb}")


def read_fingerprint(folder: Path) -> Fingerprint:
    """Read the fingerprint of a run."""
    path = folder / FINGERPRINT
    try:
        return Fingerprint.from_json(storage.parse_json(path.read_bytes()))
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{path} is damaged") from None


def is_busy(folder: Path) -> bool:
    """Return whether another process is working on a run at this moment."""
    try:
        _locked(folder).close()
    except (BusyError, FileNotFoundError) as error:
        return isinstance(error, BusyError)
    return False


def _locked(folder: Path) -> IO[bytes]:
    try:
        return storage.lock_file(folder / LOCK)
    except BlockingIOError:
        raise BusyError(
            f"another process is working on {folder}; wait for it, or choose another folder"
        ) from None


def _round_of(path: Path) -> int:
    """Read the round of a checkpoint; 0 where there is none that can be read."""
    try:
        return int(storage.parse_json(path.read_bytes())["round"])
    except (OSError, OverflowError, ValueError, LookupError, TypeError):
        return 0


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
