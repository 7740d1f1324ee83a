"""Run the tests that need no extras with the lowest or the newest versions of the dependencies.

    python tools/check_versions.py --lowest
    python tools/check_versions.py --newest --torch 2.13.0 -- -k aggregate

A virtual environment gets the direct dependencies of pyproject.toml, at their lower bounds or at
the newest versions that pip finds, then pytest and the package itself. `--torch` fixes the version
of torch, where pip has a CPU build of one version only. Tests that miss an optional dependency are
skipped (tests/helpers/core_only.py); folders whose tests start commands that need one are left
out. Arguments after `--` are passed to pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ["pytest>=9", "hypothesis>=6.100", "pytest-xdist>=3.6"]
COMMANDS = ["analysis", "benchmarks", "cli", "distributed", "docs", "flower", "reproduce", "tools"]
NEED_EXTRAS = [*COMMANDS, "tuning", "typing", "test_examples.py"]  # of the folder tests


def lowest(requirement: str) -> str:
    """Return a requirement with its lower bound as the only version.

    >>> lowest("numpy>=2.0")
    'numpy==2.0'
    >>> lowest("flwr>=1.41,!=1.42.0")
    'flwr==1.41'
    """
    found = re.fullmatch(r"([\w.-]+)>=([\w.]+)(,.*)?", requirement)
    if found is None:
        raise SystemExit(f"{requirement} has no lower bound: write it as name>=version")
    return f"{found[1]}=={found[2]}"


def requirements(low: bool, torch: str | None) -> list[str]:
    """Return the requirements of the environment, torch first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [lowest(each) if low else each for each in project["dependencies"]]
    if torch is not None:
        found = [f"torch=={torch}" if re.match(r"torch\b", each) else each for each in found]
    return found


def run(*command: str | Path, **environment: str) -> None:
    """Run a command in the root of the repository; exit with its status if it fails."""
    given = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    ended = subprocess.run([str(part) for part in command], cwd=ROOT, env=given)
    if ended.returncode:
        raise SystemExit(ended.returncode)


def check(folder: Path, packages: list[str], options: list[str]) -> None:
    """Create an environment with these packages and run the tests in it."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "-q", *packages, *TOOLS)
    run(*pip, "install", "-q", "--no-deps", "-e", ROOT)
    run(*pip, "list")
    left_out = [f"--ignore=tests/{name}" for name in NEED_EXTRAS]
    plugin = ["-p", "tests.helpers.core_only"]
    run(python, "-m", "pytest", *plugin, *left_out, "src", "tests", *options, OMP_NUM_THREADS="1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    versions = parser.add_mutually_exclusive_group(required=True)
    versions.add_argument("--lowest", action="store_true", help="the lower bounds")
    versions.add_argument("--newest", action="store_true", help="the newest versions allowed")
    parser.add_argument("--torch", metavar="VERSION", help="take this version of torch")
    parser.add_argument("--environment", type=Path, metavar="DIR", help="store it here")
    parser.add_argument("pytest", nargs="*", help="options of pytest, after --")
    given = parser.parse_args()
    packages = requirements(given.lowest, given.torch)
    with tempfile.TemporaryDirectory() as folder:
        check(given.environment or Path(folder), packages, given.pytest)


if __name__ == "__main__":
    main()
