"""Build the distributions twice, check them, and run the wheel from an empty folder.

What the working tree hides shows up here: a file that is not packaged, a type marker that is
missing, an import that only works from the source folder, a description that a package index does
not render, an archive whose bytes depend on when it was built.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
import fedexp, fedexp.cli.main
here = pathlib.Path(fedexp.__file__).parent
assert here.parent == pathlib.Path(sys.argv[1]), here
assert (here / "py.typed").exists() and (here / "analysis" / "report" / "page.html").exists()
record = list(fedexp.simulate(fedexp.tasks.toy(), fedexp.fedexp(), rounds=2))[-1]
print(f"wheel of fedexp {fedexp.__version__} imports and runs: loss {record.train_loss:.3g}")
"""


def python(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    """Run Python with these arguments; raise if it fails."""
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, check=True, cwd=cwd, env={**os.environ, **environment})


def git(*arguments: str) -> str:
    """Return the output of a git command; empty outside a repository."""
    ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return ended.stdout.strip() if ended.returncode == 0 else ""


def build(folder: Path) -> tuple[Path, Path]:
    """Return the sdist and the wheel, with the time of the last commit in their archives."""
    epoch = git("log", "-1", "--format=%ct") or "1700000000"
    formats = ["--no-isolation", "--sdist", "--wheel"]
    python("-m", "build", *formats, "-o", folder, SOURCE_DATE_EPOCH=epoch)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_same(first: Path, second: Path) -> None:
    """Exit if two builds of a file differ."""
    if first.read_bytes() != second.read_bytes():
        raise SystemExit(f"two builds of {first.name} differ: compare {first} and {second}")


def check_sdist(sdist: Path) -> None:
    """Exit if the sdist has not just the tracked files, without the repository's own workflow."""
    with tarfile.open(sdist) as archive:
        packed = {file.name.partition("/")[2] for file in archive.getmembers() if file.isfile()}
    tracked = {name for name in git("ls-files").splitlines() if (ROOT / name).exists()}
    absent = {n for n in tracked - packed if not n.startswith((".ci/", ".github/"))}
    if absent:
        raise SystemExit(f"the sdist lacks {len(absent)} tracked files: {sorted(absent)[:5]}")
    if added := packed - tracked - {"PKG-INFO"}:
        raise SystemExit(f"the sdist has files that are not tracked: {sorted(added)[:5]}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist, wheel = build(folder / "first")
        for file, again in zip((sdist, wheel), build(folder / "second"), strict=True):
            check_same(file, again)
        check_sdist(sdist)
        python("-m", "twine", "check", "--strict", sdist, wheel)
        site = folder / "site"
        python("-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel)
        python("-c", PROGRAM, site, cwd=folder)


if __name__ == "__main__":
    main()
