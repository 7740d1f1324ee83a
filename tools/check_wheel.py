"""Build the wheel, install it alone into an empty folder, and import it from there.

What the working tree hides shows up here: a file that is not packaged, a type marker that is
missing, an import that only works from the source folder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

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


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    root = Path(__file__).parent.parent
    python = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        run(python, "-m", "build", "--wheel", "--no-isolation", "-o", str(wheels), str(root))
        (wheel,) = wheels.glob("*.whl")
        run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel))
        subprocess.run([python, "-c", PROGRAM, str(site)], check=True, cwd=folder)


if __name__ == "__main__":
    main()
