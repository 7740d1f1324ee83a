"""Without Flower, or with a later one, the rest works, and one line names what to install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from fedexp.flower.secure import VERSIONS

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys

sys.modules["flwr"] = None
import fedexp
from fedexp.errors import UsageError

try:
    import fedexp.flower
except UsageError as error:
    print(error)
"""


def test_the_missing_extra_is_named_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout == "fedexp.flower needs flwr: pip install 'fedexp[flower]'\n"


LATER_FLOWER = """
import sys

import flwr

for part in ("flwr.server.workflow", "flwr.client.mod", "flwr.compat"):
    sys.modules[part] = None
import fedexp.flower
from fedexp.errors import UsageError

print(fedexp.flower.FedExP(fraction_evaluate=0.0).settings.secure)
for use in ("secure_mod", "SecureMod", "SecureAggregation(clip=1.0)"):
    try:
        eval(f"fedexp.flower.{use}")
    except UsageError as error:
        print(error)
"""


def test_without_flowers_legacy_workflow_only_secure_sums_fail() -> None:
    """One line names the extra and the versions that have it."""
    done = subprocess.run(
        [sys.executable, "-c", LATER_FLOWER], capture_output=True, text=True, check=True
    )
    first, *refusals = done.stdout.splitlines()
    assert first == "None"
    assert len(refusals) == 3
    for line in refusals:
        assert line.startswith(f"secure aggregation needs flwr{VERSIONS}, ")
        assert line.endswith("pip install 'fedexp[flower-secure]'")


def test_the_extra_has_the_bound_that_the_error_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["flower-secure"] == [f"flwr{VERSIONS}"]
    assert "<" in VERSIONS
    assert "flower-secure" in extras["all"][0]
