"""The folder of a run: made, locked, checked, and removed where a mistake left it empty."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy
import torch

from fedexp import __version__
from fedexp.errors import UsageError, require, shown
from fedexp.experiments.spec import Run
from fedexp.runs.atomic import telling, write_bytes, write_json
from fedexp.runs.checkpoint import BEFORE, NEWEST
from fedexp.runs.foreign import is_count, parse_json
from fedexp.runs.records import RECORDS, read_rows
from fedexp.runs.spec_file import HEAD, SPEC, check_same, frozen, read_spec, spec_text

MOST_THREADS = 4096  # that a run can have begun with
CHECKPOINT_FILES = (".json", ".safetensors", ".slots")
ENVIRONMENT, RESULT, MODEL, LOCK = "environment.json", "result.json", "model.safetensors", ".lock"


class BusyError(UsageError):
    """Another process holds the folder of a run."""


class RunWarning(UserWarning):
    """Something about a stored run that its reader should know."""


def is_run(path: Path) -> bool:
    """Whether a folder holds a run; its spec is the first file that it gets."""
    return (path / SPEC).is_file()


class RunFolder:
    """A run on the disk, held by this process alone while the block lasts.

    The lock is one of the operating system's, so a process that is killed leaves none behind.

    Args:
        path: the folder.
        spec: the run's frozen spec; a folder with another one is refused.
        about: where and with what the run began, should it begin now.
        head: the first line of `spec.toml`.
    """

    def __init__(
        self, path: Path, spec: Mapping[str, Any], about: Mapping[str, Any], head: str = HEAD
    ) -> None:
        self.path, self.spec, self.about, self.head = path, spec, about, head
        self._made = [p for p in (path, *path.parents) if not p.exists()]
        self._began = False
        self._lock: IO[bytes] | None = None

    @classmethod
    def of(cls, path: Path, run: Run) -> RunFolder:
        """The folder of a simulated run."""
        return cls(path, frozen(run), environment(run))

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
        if self._began and isinstance(error, UsageError) and not read_rows(self.path):
            self._remove()
        if self._lock is not None:
            self._lock.close()

    def clear(self) -> None:
        """Begin again; the spec stays.

        Whoever is killed in here leaves the old run, or none of it: what refers to other files goes
        before them.
        """
        for name in (RESULT, BEFORE, NEWEST):
            (self.path / name).unlink(missing_ok=True)
        for path in self._own_files():
            if path.name not in (SPEC, LOCK, ENVIRONMENT):
                path.unlink()
        write_json(self.path / ENVIRONMENT, self.about)

    def threads(self) -> int:
        """How many threads the run began with: sums over more of them round differently."""
        known: Any = read_environment(self.path).get("threads")
        return int(known) if is_count(known, 1, MOST_THREADS) else torch.get_num_threads()

    def note_resumed(self, round: int) -> None:
        """Add to the environment that another process goes on from here."""
        known = read_environment(self.path)
        again = {"round": round, "fedexp": __version__, "started": _now(), "command": _command()}
        earlier = known.get("resumed")
        known["resumed"] = [*(earlier if isinstance(earlier, list) else []), again]
        write_json(self.path / ENVIRONMENT, known)

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
            warn_of_version(self.path)
            return
        self._began = True
        write_json(self.path / ENVIRONMENT, self.about)
        write_bytes(self.path / SPEC, spec_text(self.spec, self.head).encode())

    def _own_files(self) -> list[Path]:
        known = {SPEC, ENVIRONMENT, RESULT, MODEL, LOCK, RECORDS}
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
        "command": _command(),
        "started": _now(),
    }


def read_environment(folder: Path) -> dict[str, Any]:
    """What `environment.json` says; nothing where it cannot be read, for a run goes on without."""
    try:
        found = parse_json((folder / ENVIRONMENT).read_bytes())
    except (OSError, ValueError):
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


def _locked(folder: Path) -> IO[bytes]:
    try:
        import fcntl
    except ImportError:
        raise UsageError("keeping runs needs a system with file locks; use --no-save") from None
    file = (folder / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise BusyError(
                f"another process is working on {folder}; wait for it, or choose another folder"
            ) from None
        raise UsageError(
            f"cannot lock {folder}: {error.strerror}; choose a folder on another disk, or --no-save"
        ) from None
    return file


def _command() -> str:
    return shlex.join([os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]])


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
