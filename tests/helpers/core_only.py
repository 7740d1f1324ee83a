"""A pytest plugin that skips the tests for which an optional dependency is missing.

`tools/check_versions.py` loads it (`-p tests.helpers.core_only`) in environments that have the
direct dependencies of the package and no extras. A test is skipped if it, or the import of its
file, fails because of a missing module, in this process or in one that it started. `import fedexp`
must succeed: it is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from doctest import UnexpectedException
from typing import Any

import pytest

import fedexp  # noqa: F401

NEEDS_EXTRA = re.compile(r"pip install '(fedexp\[[a-z-]+\])'")
# What the extras install, and what those import: any other missing module is an error.
EXTRAS = {"dp_accounting", "flwr", "flwr_datasets", "h5py", "matplotlib", "mlflow", "mpl_toolkits"}
EXTRAS |= {"optuna", "pandas", "PIL", "plotly", "ray", "requests", "scipy", "sklearn"}
EXTRAS |= {"tensorboard", "torchmetrics", "wandb", "playwright", "nbformat", "nbclient", "yaml"}
EXTRAS |= {
    "torchft",
    "opentelemetry",
    "absl",
    "build",
    "hatchling",
    "mkdocs",
    "mypy",
    "sqlalchemy",
    "twine",
}
NO_MODULE = re.compile(r"No module named '?([A-Za-z_]\w*)")


def missing(text: str) -> str | None:
    """Return the extra or the module that an error message reports as missing, if any."""
    if found := NEEDS_EXTRA.search(text):
        return found[1]
    return next((name for name in NO_MODULE.findall(text) if name in EXTRAS), None)


def messages(error: BaseException | None) -> str:
    """Return the messages of an exception and of those that caused it, one per line."""
    found: list[str] = []
    while error is not None and len(found) < 20:
        if isinstance(error, UnexpectedException):  # of a doctest
            error = error.exc_info[1]
        found.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(found)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Generator[None, Any, Any]:
    """Skip a file whose import fails because of a missing module."""
    report = yield
    if report.failed and (name := missing(messages(report.call.excinfo.value))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"needs {name}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """Skip a test that fails because of a missing module, as its error or its output states."""
    report = yield
    if report.failed:
        captured = [item.funcargs[name] for name in ("capsys", "capfd") if name in item.funcargs]
        output = [text for fixture in captured for text in fixture.readouterr()]
        output += [report.capstdout, report.capstderr, messages(call.excinfo.value)]
        if name := missing("\n".join(output)):
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"needs {name}")
    return report
