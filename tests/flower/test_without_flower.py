"""Without Flower the package works, and `fedexp.flower` says what to install."""

from __future__ import annotations

import subprocess
import sys

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


def test_what_to_install_is_one_line() -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert said.stdout == "fedexp.flower needs flwr: pip install 'fedexp[flower]'\n"
