"""Run the notebooks of docs/tutorials and store them with their outputs.

    python -m tools.docs.run_notebooks                                   # all of them
    python -m tools.docs.run_notebooks docs/tutorials/3-your-own-rule.ipynb

Each notebook runs in a fresh kernel, in a scratch folder with the other files of docs/tutorials.
tests/docs/test_notebooks.py runs them in the same way and compares the text outputs of cells with
the tag `checked` with the stored ones.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
SECONDS = 300  # for one cell


def notebooks() -> list[Path]:
    """Return the paths of all notebooks, in order."""
    return sorted(TUTORIALS.glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    """Return a stored notebook."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def serialised(notebook: NotebookNode) -> str:
    """Return the text of the file of a notebook."""
    return nbformat.writes(notebook) + "\n"  # type: ignore[no-untyped-call]


def executed(path: Path, folder: Path) -> NotebookNode:
    """Return the notebook after all its cells have run in `folder`, which is created.

    A cell that raises ends the run with `nbclient.exceptions.CellExecutionError`.
    """
    assets = shutil.ignore_patterns("*.ipynb", "runs", "*.db", ".ipynb_checkpoints")
    shutil.copytree(path.parent, folder, ignore=assets)
    notebook = read(path)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=40"],
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(folder / ".ipython"),
        "FLWR_HOME": str(folder / ".flwr"),
        "PYTHONWARNINGS": "ignore:IProgress not found",  # which concerns widgets; none is used
    }
    client.execute(env={**os.environ, **settings})
    return notebook


def checked_texts(notebook: NotebookNode) -> list[str]:
    """Return the text outputs of each cell with the tag `checked`."""
    cells = [cell for cell in notebook.cells if "checked" in cell.metadata.get("tags", [])]
    return ["".join(map(_text, cell.outputs)) for cell in cells]


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Return the notebook without what differs between machines: versions, times, cell ids."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells, start=1):
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.docs.run_notebooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="all of docs/tutorials by default")
    for path in parser.parse_args(argv).notebooks or notebooks():
        with TemporaryDirectory() as scratch:
            notebook = cleaned(executed(path, Path(scratch) / "notebook"))
        path.write_text(serialised(notebook), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    return 0


def _text(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    return output.get("data", {}).get("text/plain", "")


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join consecutive parts of a stream, which arrive in pieces of any length."""
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == "stream" and last.get("name") == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    sys.exit(main())
