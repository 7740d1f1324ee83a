"""What two ranks compute: under torchrun, write `ranks.json` and run a command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fedexp_command
from tests.golden.cases import ROUNDS, SMALL, STABLE, compared, run, tuned

if __name__ == "__main__":
    tree = {
        "run digits": run("digits", "fedexp"),
        "run digits-mlp": run("digits-mlp", "scaffold-exp", engine="batched", local=STABLE),
        "run synthetic": run("synthetic", "fedadagrad", options=SMALL),
        "compare": compared("digits", ["fedavg", "fedexp"], target=0.6),
        "tune": tuned("synthetic", "fedprox", {"local.lr": [0.01, 0.05]}, options=SMALL),
    }
    if os.environ["RANK"] == "0":
        Path("ranks.json").write_text(json.dumps(tree))
    words = ["run", "digits", "--algorithm", "fedexp-m", "--rounds", f"{ROUNDS}"]
    sys.argv = ["fedexp", *words, "--json", "--quiet"]
    sys.exit(fedexp_command.main())
