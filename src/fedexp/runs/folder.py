"""Where numbers come from: the command that began a run, and the commits of the code it used.

The folder of a run: made, locked, checked, and removed where a mistake left it empty.

Beside the spec it has a fingerprint of what the run is made from (`fingerprint.json`): the same
command with other data, another model or other code is another run, and is refused.

The command line that repeats a run.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy
import torch

from fedexp import __version__
from fedexp.errors import UsageError, require, shown
from fedexp.runs.checkpoint import BEFORE, NEWEST
from fedexp.runs.files import (
    PRIVATE,
    RECORDS,
    finite,
    is_count,
    lock_file,
    parse_json,
    read_rows,
    result_fault,
    telling,
    write_bytes,
    write_json,
)
from fedexp.runs.fingerprint import Fingerprint, joined
from fedexp.runs.spec import HEAD, SPEC, Run, check_same, frozen, is_run, read_spec, spec_text

PACKAGE = Path(__file__).resolve().parents[1]
GIT_SECONDS = 2.0  # after which a repository is taken for none


def command() -> str:
    """Return the command of this process.

    Only of `fedexp` itself with its arguments: other programs have been given tokens and keys in
    theirs, Flower's processes among them, and a run folder is no place for secrets.
    """
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path("python")
    is_ours = program.name == "fedexp" or program == PACKAGE / "__main__.py"
    return shlex.join([program.name, *(sys.argv[1:] if is_ours else [])])


def commits() -> dict[str, Any]:
    """Return the commits of fedexp, if it runs from a checkout, and of the working directory.

    Each with whether files that it tracks have been changed since. Nothing where there is no
    repository, or no git.
    """
    return _commits(PACKAGE, Path(os.path.abspath(os.curdir)))


@lru_cache(maxsize=4)
def _commits(package: Path, here: Path) -> dict[str, Any]:
    own = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    top = _git(package, "rev-parse", "--show-toplevel") if own else None
    found = _commit(package, "fedexp") if own else {}
    if _git(here, "rev-parse", "--show-toplevel") not in (None, top):
        found |= _commit(here, "project")
    return {"git": found} if found else {}


def _commit(folder: Path, name: str) -> dict[str, Any]:
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {name: commit} | ({} if changed is None else {f"{name}_dirty": changed != ""})


def _git(folder: Path, *arguments: str) -> str | None:
    """Ask git; None where it fails. Runs no hook of the repository, and takes no lock."""
    words = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


MOST_THREADS = 4096  # that a run can have begun with
CHECKPOINT_FILES = (".json", ".safetensors", ".slots")
ENVIRONMENT, RESULT, MODEL, LOCK = "environment.json", "result.json", "model.safetensors", ".lock"
FINGERPRINT = "fingerprint.json"
RELEASES = (
    "checkpoint-releases.json"  # what a private run has spent: nothing but its owner undoes it
)
RESTART = "--restart discards it and runs it again"
BY_HAND = "remove the folder to run it again"


class BusyError(UsageError):
    """Another process holds the folder of a run."""


class OtherContentError(UsageError):
    """The folder holds a run of the same name that is made from something else."""


class RunWarning(UserWarning):
    """Something about a stored run that its reader should know."""


class RunFolder:
    """A run on the disk, held by this process alone while the block lasts.

    The lock is one of the operating system's, so a process that is killed leaves none behind.

    Args:
        path: the folder.
        spec: the run's frozen spec; a folder with another one is refused.
        about: where and with what the run began, should it begin now.
        head: the first line of `spec.toml`.
        fingerprint: of what the run is made from; a folder with another one is refused. None
            neither checks nor stores any.
        restart: discard what the folder holds of the run, whatever that was made from.
    """

    def __init__(
        self,
        path: Path,
        spec: Mapping[str, Any],
        about: Mapping[str, Any],
        head: str = HEAD,
        fingerprint: Fingerprint | None = None,
        restart: bool = False,
    ) -> None:
        self.path, self.spec, self.about, self.head = path, spec, about, head
        self.fingerprint, self.restart = fingerprint, restart
        self._made = [p for p in (path, *path.parents) if not p.exists()]
        self._began = False
        self._lock: IO[bytes] | None = None

    @classmethod
    def of(cls, path: Path, run: Run, restart: bool = False) -> RunFolder:
        """The folder of a simulated run."""
        return cls(path, frozen(run), environment(run), HEAD, run.fingerprint, restart)

    def __enter__(self) -> RunFolder:
        with telling(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_strangers()
            self._lock = _locked(self.path)
        try:
            with telling(self.path):
                self._check_or_begin()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        mistaken = self._began and isinstance(error, UsageError)
        if mistaken and not (self.path / RELEASES).exists() and not read_rows(self.path):
            self._remove()
        if self._lock is not None:
            self._lock.close()

    def clear(self) -> None:
        """Discard all but the spec, and what a private run has spent.

        Whoever is killed in here leaves the old run, or none of it: what refers to other files goes
        before them, and the old fingerprint goes last.
        """
        for name in (RESULT, BEFORE, NEWEST):
            (self.path / name).unlink(missing_ok=True)
        for path in self._own_files():
            if path.name not in (SPEC, LOCK, ENVIRONMENT, FINGERPRINT, RELEASES):
                path.unlink()
        self._describe()

    def threads(self) -> int:
        """How many threads the run began with: sums over more of them round differently."""
        known: Any = read_environment(self.path).get("threads")
        return int(known) if is_count(known, 1, MOST_THREADS) else torch.get_num_threads()

    def note_resumed(self, round: int) -> None:
        """Add to the environment that another process goes on from here."""
        known = read_environment(self.path)
        again = {"round": round, "fedexp": __version__, "started": _now(), "command": command()}
        known["resumed"] = [*_listed(known, "resumed"), again | commits()]
        self._write_environment(known)

    def reopen(self) -> int | None:
        """Let a run that ended as diverged continue from its last checkpoint; return its round.

        One absurd update or evaluation ends a federation for good otherwise. A run that was
        reopened at that round before goes back to the checkpoint before it, where there is one:
        what the newest holds may be what made it diverge. None where the run did not diverge.
        """
        try:
            result = parse_json((self.path / RESULT).read_bytes())
        except (OSError, ValueError):
            return None
        if result_fault(result) is not None or result["status"] != "diverged":
            return None
        known = read_environment(self.path)
        at, before = (_round_of(self.path / name) for name in (NEWEST, BEFORE))
        with telling(self.path):
            if at in [each.get("round") for each in _listed(known, "reopened")] and before:
                os.replace(self.path / BEFORE, self.path / NEWEST)
                at = before
            (self.path / RESULT).unlink()
            ended = {"diverged_at": result.get("diverged_at"), "reason": result.get("reason")}
            again = {"round": at, "started": _now(), **ended}
            known["reopened"] = [*_listed(known, "reopened"), again]
            self._write_environment(known)
        return at

    def _write_environment(self, known: dict[str, Any]) -> None:
        """Write it without the arguments of Flower's processes, which hold tokens."""
        if self.spec.get("engine") == "flower":
            known = {name: value for name, value in known.items() if name != "command"}
            for each in _listed(known, "resumed"):
                each.pop("command", None)
        write_json(self.path / ENVIRONMENT, known, mode=PRIVATE)

    def _describe(self) -> None:
        self._write_environment(dict(self.about))
        if self.fingerprint is not None:
            write_json(self.path / FINGERPRINT, self.fingerprint.to_json())
        else:
            (self.path / FINGERPRINT).unlink(missing_ok=True)

    def _refuse_strangers(self) -> None:
        """A folder is taken if it is a run, or empty but for what a killed beginning left."""
        others = set(self.path.iterdir()) - set(self._own_files())
        require(
            is_run(self.path) or not others,
            f"{self.path} is not empty and holds no run; choose another folder",
        )

    def _check_or_begin(self) -> None:
        for path in self.path.glob(".*.tmp"):
            path.unlink()  # whoever was writing it has been killed
        if is_run(self.path):
            check_same(read_spec(self.path), self.spec, self.path)
            if self.restart:
                self.clear()
                return
            warn_of_version(self.path)
            if self.fingerprint is None:
                return
            if any((self.path / name).exists() for name in (RESULT, NEWEST, BEFORE)):
                flower = self.spec.get("engine") == "flower"
                check_content(self.path, self.fingerprint, BY_HAND if flower else RESTART)
            else:  # it was killed before anything was stored that could be taken for today's
                self._describe()
            return
        self._began = True
        self._describe()
        write_bytes(self.path / SPEC, spec_text(self.spec, self.head).encode())

    def _own_files(self) -> list[Path]:
        known = {SPEC, ENVIRONMENT, FINGERPRINT, RESULT, MODEL, LOCK, RECORDS}
        return [
            path
            for path in self.path.iterdir()
            if path.name in known
            or (path.name.startswith("checkpoint") and path.suffix in CHECKPOINT_FILES)
            or (path.name.startswith(".") and path.suffix == ".tmp")
        ]

    def _remove(self) -> None:
        """Leave nothing behind: the files of a run that never had a round, the folders made."""
        for path in self._own_files():
            path.unlink(missing_ok=True)
        with suppress(OSError):  # a folder that others use by now stays
            for folder in self._made:
                folder.rmdir()


def environment(run: Run) -> dict[str, Any]:
    """Where and with what a run began, and by which metric a report judges it."""
    on_gpu = torch.device(run.spec.device or "cpu").type == "cuda"
    return {**machine(on_gpu), "metric": run.task.metric, "target": run.task.target}


def machine(on_gpu: bool = False) -> dict[str, Any]:
    """This machine, its libraries, the command and the time."""
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


def _listed(known: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return what an environment lists under a name, as far as it can be read."""
    entries = known.get(name)
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def read_environment(folder: Path) -> dict[str, Any]:
    """What `environment.json` says; nothing where it cannot be read, for a run goes on without."""
    try:
        found = finite(parse_json((folder / ENVIRONMENT).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def warn_of_version(folder: Path) -> None:
    """Say in a line where a run was written by another version of the package."""
    theirs = read_environment(folder).get("fedexp", __version__)
    if theirs != __version__:
        warnings.warn(
            f"{folder} was begun with fedexp {shown(theirs)}; this is {__version__}, and its "
            "numbers may differ",
            RunWarning,
            stacklevel=2,
        )


def check_content(folder: Path, wanted: Fingerprint, remedy: str = RESTART) -> None:
    """Refuse a run that is made from something else; warn of one that does not say from what."""
    found = read_fingerprint(folder, remedy)
    if found is not None:
        apart = found.differences(wanted)
        verb = "differs" if len(apart) == 1 else "differ"
        if apart:
            raise OtherContentError(
                f"{folder} holds a run of other content: {joined(apart)} {verb}; {remedy}"
            )
        return
    if wanted.first > 1:
        raise OtherContentError(
            f"{folder} was begun by an older version, whose server rule gave other numbers; "
            f"{remedy}"
        )
    warnings.warn(
        f"{folder} was begun before runs had fingerprints: whether its data, model and code are "
        f"today's is not known; {remedy}",
        RunWarning,
        stacklevel=2,
    )


def read_fingerprint(folder: Path, remedy: str = RESTART) -> Fingerprint | None:
    """Read what a run was made from; None where an older version made it."""
    path = folder / FINGERPRINT
    try:
        return Fingerprint.from_json(parse_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is damaged; {remedy}") from None


def _locked(folder: Path) -> IO[bytes]:
    try:
        return lock_file(folder / LOCK, "choose a folder on another disk, or --no-save")
    except BlockingIOError:
        raise BusyError(
            f"another process is working on {folder}; wait for it, or choose another folder"
        ) from None


def _round_of(path: Path) -> int:
    """Read the round of a checkpoint; 0 where there is none that can be read."""
    try:
        return int(parse_json(path.read_bytes())["round"])
    except (OSError, OverflowError, ValueError, LookupError, TypeError):
        return 0


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


# Options of `fedexp run` that are left out where they have their default.
DEFAULTS = {"mode": "paper", "engine": "auto", "device": None, "precision": None}


def rerun(spec: Mapping[str, Any]) -> str:
    """`fedexp run ...`, quoted for a shell; names every number that a task would choose itself.

    >>> rerun({"task": "toy", "algorithm": "fedexp", "seed": 1, "rounds": 9, "evaluate_every": 2,
    ...        "set": {"eps": "0.1"}})
    'fedexp run toy --algorithm fedexp --seed 1 --rounds 9 --cohort all --evaluate-every 2
        --set eps=0.1'
    """
    if spec.get("engine") == "flower":
        return "flwr run ."
    words = ["fedexp", "run", spec["task"], "--algorithm", spec["algorithm"]]
    words += ["--seed", spec["seed"], "--rounds", spec["rounds"]]
    words += ["--cohort", spec.get("cohort") or "all", "--evaluate-every", spec["evaluate_every"]]
    for name, default in DEFAULTS.items():
        if spec.get(name, default) != default:
            words += [f"--{name}", spec[name]]
    if spec.get("stop_at") is not None:
        words += ["--stop-at", spec["stop_at"]]
    if spec.get("deterministic"):
        words += ["--deterministic"]
    for key, value in spec.get("set", {}).items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(map(str, words))
