"""Imports go one way, and `import fedexp` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import fedexp

PACKAGE = Path(fedexp.__file__).parent
GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"
HEAVY = {
    "matplotlib",
    "sklearn",
    "rich",
    "scipy",
    "h5py",
    "PIL",
    "requests",
    "flwr",
    "optuna",
    "dp_accounting",
    "jinja2",
    "pandas",
    "plotly",
    "safetensors",
    "tomli_w",
    "torchft",
}


def layers() -> dict[str, int]:
    """Return the place of each module in the list of the guide; names joined by "and" share one."""
    listed = GUIDE.read_text().partition("**Imports go one way:**")[2].partition(". ")[0]
    places = [*" ".join(listed.split()).split(", "), "__init__ and __main__"]
    return {name: at for at, names in enumerate(places) for name in names.split(" and ")}


def imported(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fedexp":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedexp."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("fedexp.")}
    return found - {"__version__"}


def test_imports_go_one_way() -> None:
    wrong, place, modules = [], layers(), set()
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        modules.add(module)
        others = [name for name in imported(path) - {module} if place[name] >= place[module]]
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in others]
    assert not wrong
    assert modules == place.keys()


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys, fedexp; print(*{name.split('.')[0] for name in sys.modules})"
    listed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(listed.stdout.split())


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
