"""Imports go one way, and `import fedexp` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import fedexp

PACKAGE = Path(fedexp.__file__).parent
# A module may import from its own layer's package and from the layers above it in this list.
LAYERS = [
    {"errors"},
    {"optional"},
    {"seeding", "precision", "storage", "identity"},
    {"kernels"},
    {"aggregate"},
    {"server", "client", "local"},
    {"algorithms", "projections"},
    {"data"},
    {"cohorts"},
    {"privacy"},
    {"models"},
    {"objective"},
    {"tasks"},
    {"references"},
    {"options"},
    {"engine"},
    {"experiment"},
    {"distributed"},
    {"runs"},
    {"analysis", "flower"},
    {"tuning"},
    {"reproduce"},
    {"api"},
    {"cli"},
    {"__init__", "__main__"},
]
HEAVY = {
    "matplotlib",
    "sklearn",
    "rich",
    "scipy",
    "h5py",
    "PIL",
    "pooch",
    "flwr",
    "optuna",
    "dp_accounting",
    "pandas",
    "plotly",
    "safetensors",
    "tomli_w",
}


def layer(module: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if module in names)


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
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        others = [name for name in imported(path) - {own} if layer(name) >= layer(own)]
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in others]
    assert not wrong


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys, fedexp; print(*{name.split('.')[0] for name in sys.modules})"
    listed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(listed.stdout.split())


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
