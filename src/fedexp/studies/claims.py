"""Who works on what, among processes that share a study: locks beside its file.

They are locks of the operating system, which lets go of them when their holder ends, however it
does: so what a killed process had begun is free at once for the others. On a disk that several
machines share they hold between machines, if the disk has file locks at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fedexp.data.extras import extra
from fedexp.errors import UsageError, require


class Claims:
    """The trials that this process has taken of a study.

    Claims are taken and given back while the study is held, so no two processes can believe that
    they have the same one.

    Args:
        path: the file of the study; it can hold several.
    """

    def __init__(self, path: Path) -> None:
        require(not path.is_dir(), f"{path} is a folder; name a file with --study")
        self._path, self._folder = path, path.with_name(f".{path.name}.claims")
        self._mine: dict[str, IO[bytes]] = {}
        self._held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the study to oneself for a moment; waits for whoever has it. May be nested."""
        if self._held:
            yield
            return
        with self._told():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = _locked(self._path.with_name(f".{self._path.name}.lock"), wait=True)
        with lock:
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def take(self, name: str) -> bool:
        """Whether the trial is this process's now; not if a process has it, be it this one."""
        with self._told():
            self._folder.mkdir(exist_ok=True)
            try:
                self._mine[name] = _locked(self._folder / name, wait=False)
            except BlockingIOError:
                return False
        return True

    def release(self, name: str) -> None:
        """Give a trial back, done or not."""
        with self._told():
            (self._folder / name).unlink(missing_ok=True)
        self._mine.pop(name).close()

    def close(self) -> None:
        """Give back what is left, and leave no folder behind if nobody else needs it."""
        with self.held():
            for name in list(self._mine):
                self.release(name)
            with suppress(OSError):
                self._folder.rmdir()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"cannot write {self._path}: {reason}; choose another --study"
            ) from None


def _locked(path: Path, wait: bool) -> IO[bytes]:
    """The file, locked; `BlockingIOError` where another holds it and is not to be waited for."""
    fcntl: Any = extra("fcntl", "keeping a study", "a system with file locks", group="tune")
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file
