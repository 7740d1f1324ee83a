"""Run a part of the relative-eps study (docs/eps-study.md); `make results` writes its tables.

    python -m tools.eps_study --tasks digits,digits-mlp,synthetic,mnist-200
    python -m tools.eps_study --tasks emnist,cifar10 --device cuda --precision bf16
    python -m tools.eps_study --variants scaffold-exp,fedexp-m --tasks digits,digits-mlp,mnist-200

Selection tasks run every candidate; confirmation tasks the constants that the stored selection runs
choose, and variants of FedExP the constant that it has. Stored runs are not run again: an
interrupted command continues where it stopped.
"""

from __future__ import annotations

import argparse
import math
import sys
from itertools import product
from pathlib import Path

from fedexp.errors import UsageError, unknown_name
from tools.eps_study import protocol
from tools.eps_study.curves import execute
from tools.eps_study.measures import constants, load_all

FOLDER = Path(__file__).parents[2] / "results" / "eps-study"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.eps_study", description=__doc__)
    parser.add_argument("--tasks", required=True, help=f"of {', '.join(protocol.TASKS)}")
    parser.add_argument(
        "--variants", default=protocol.FEDEXP, help=f"of {', '.join(protocol.VARIANTS)}"
    )
    parser.add_argument("--device", help="e.g. cuda")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the CSV files")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no run of a task after this time"
    )
    given = parser.parse_args(argv)
    try:
        pairs = list(product(given.variants.split(","), given.tasks.split(",")))
        for variant, name in pairs:
            if variant not in protocol.VARIANTS:
                raise unknown_name("variant", variant, protocol.VARIANTS)
            if name not in protocol.TASKS:
                raise unknown_name("task", name, protocol.TASKS)
        for variant, name in pairs:
            execute(
                name,
                _constants(name, variant),
                given.out,
                variant=variant,
                device=given.device,
                precision=given.precision,
                seconds=given.seconds,
                log=lambda line: print(line, flush=True),
            )
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _constants(name: str, variant: str) -> tuple[float, ...]:
    """Return the relative eps to run on a task."""
    if variant != protocol.FEDEXP:
        return (protocol.VARIANT_CONSTANT,)
    if protocol.TASKS[name].selects:
        return protocol.CANDIDATES
    found = constants(load_all(FOLDER))
    if not found:
        raise UsageError("no constant has been selected; run the selection tasks first")
    return found


if __name__ == "__main__":
    sys.exit(main())
