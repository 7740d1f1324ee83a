"""Where numbers come from: the command that began a run, and the commits of the code it used."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

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
