"""Run a part of the relative-eps study (docs/eps-study.md); `make results` writes its tables.

    python -m tools.eps_study --tasks digits,digits-mlp,synthetic,mnist-200
    python -m tools.eps_study --tasks emnist,cifar10 --device cuda --precision bf16
    python -m tools.eps_study --variants scaffold-exp,fedexp-m --tasks digits,digits-mlp,mnist-200

Selection tasks run every candidate; confirmation tasks the constants that the stored selection runs
choose, and variants of FedExP the constant that it has. Stored runs are not run again: an
interrupted command continues where it stopped.
"""

from __future__ import annotations

import sys
from itertools import product

from fedexp.errors import UsageError, require
from tools.eps_study import protocol
from tools.eps_study.curves import complete
from tools.eps_study.measures import constants, load_all
from tools.grid import RESULTS, named, parser_of


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("tools.eps_study", __doc__)
    parser.add_argument("--tasks", required=True, help=f"of {', '.join(protocol.TASKS)}")
    parser.add_argument(
        "--variants", default=protocol.FEDEXP, help=f"of {', '.join(protocol.VARIANTS)}"
    )
    args = parser.parse_args(argv)
    try:
        variants = named("variant", args.variants, protocol.VARIANTS)
        for variant, name in product(variants, named("task", args.tasks, protocol.TASKS)):
            complete(name, _constants(name, variant), variant, args)
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
    selected = constants(load_all(RESULTS / "eps-study"))
    require(bool(selected), "no constant has been selected; run the selection tasks first")
    return selected


if __name__ == "__main__":
    sys.exit(main())
