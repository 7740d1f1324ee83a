"""The code of docs/coming-from, theirs and ours, on the same data: test accuracy over seeds.

Every page has FedAvg by another package, in a block after a comment `no-run`, and by this one. Both
are run as they are printed, with the line `seed = 0` changed, on `examples/coming_from/digits.py`;
the last line that they print is the accuracy. Each package has a Python of its own, and is skipped
without one; PFLlib is a repository and needs its folder as well:

    python benchmarks/coming_from.py --python fedjax=ENV/bin/python \\
      --python flower=ENV/bin/python --python fluke=ENV/bin/python \\
      --python pfl-research=ENV/bin/python --python pfllib=ENV/bin/python --pfllib PFLlib/system \\
      --out benchmarks/records/DATE-cpu-coming-from.json
    python benchmarks/table.py --write

No times are taken: `peers.py` has those.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from machine import Row, hardware, write_record

ROOT = Path(__file__).resolve().parents[1]
DOCS, DATA = ROOT / "docs" / "coming-from", ROOT / "examples" / "coming_from"
PACKAGES = {  # page: its name in the text, and its distribution
    "flower": ("Flower", "flwr"),
    "pfl-research": ("pfl", "pfl"),
    "fedjax": ("FedJAX", "fedjax"),
    "pfllib": ("PFLlib", ""),
    "fluke": ("fluke", "fluke-fl"),
}
OURS = "FedExP"
BLOCK = re.compile(r"(<!-- no-run: [^\n]*-->\n)?```python\n(.*?)```", re.DOTALL)
SEED = re.compile(r"^seed = 0$", re.MULTILINE)


def blocks(page: str) -> tuple[str, str]:
    """Return their FedAvg and ours, as a page prints them."""
    found = BLOCK.findall((DOCS / f"{page}.md").read_text())
    complete = [(marked, code) for marked, code in found if SEED.search(code)]
    (theirs,) = [code for marked, code in complete if marked]
    (ours,) = [code for marked, code in complete if not marked]
    return theirs, ours


def accuracy(code: str, seed: int, python: str, folder: Path | None = None) -> float:
    """Run a block in a process of its own, in an empty folder or in the one given."""
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    more = [str(DATA), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "fedavg.py"
        script.write_text(SEED.sub(f"seed = {seed}", code))
        paths = [*([str(folder)] if folder else []), *filter(None, more)]
        done = subprocess.run(
            [python, str(script)],
            cwd=folder or scratch,
            env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return float(done.stdout.strip().splitlines()[-1])


def row(package: str, algorithm: str, version: str, values: Sequence[float]) -> Row:
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    print(f"{package} {version}, {algorithm}: {100 * mean:.1f} ± {100 * deviation:.1f} %")
    named = {"package": package, "algorithm": algorithm, "version": version}
    return {**named, "accuracies": [round(value, 4) for value in values]}


def version_of(python: str, distribution: str) -> str:
    if not distribution:
        return ""
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--python", action="append", default=[], metavar="PAGE=PYTHON", help="may be repeated"
    )
    parser.add_argument("--pfllib", type=Path, help="the folder `system` of PFLlib")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to N-1, at least 2 (5)")
    parser.add_argument("--out", type=Path, help="write all accuracies as JSON")
    args = parser.parse_args()
    where, seeds, rows = hardware(), range(args.seeds), []
    ours = blocks("flower")[1]
    for algorithm in ("fedavg", "fedexp"):
        code = ours.replace('"fedavg"', f'"{algorithm}"')
        values = [accuracy(code, seed, sys.executable) for seed in seeds]
        rows.append(row(OURS, algorithm, "", values))
    for page, python in (pair.split("=", 1) for pair in args.python):
        name, distribution = PACKAGES[page]
        folder = args.pfllib.resolve() if page == "pfllib" else None
        values = [accuracy(blocks(page)[0], seed, python, folder) for seed in seeds]
        rows.append(row(name, "fedavg", version_of(python, distribution), values))
    write_record(args.out, where, rows, rounds=50)


if __name__ == "__main__":
    main()
