"""Three processes that tune the same; torch is imported once, and each process is a fork.

sharing.py PROTOCOL    in a folder of its own; the first process is killed in its second trial

Each writes which trials it started (NUMBER.started), and those that survive what they return
(NUMBER.found).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers.tuning import StartedTrials, scores, small_tune

PROCESSES, TRIALS = 3, 9
GRID = {"server.lr": [1.0, 3.0, 10.0], "local.lr": [0.01, 0.03, 0.1]}


class InOneOfSeveral(StartedTrials):
    """Waits until every process has a trial; kills the first process in its second trial."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def on_start(self) -> None:
        Path(f"{self._number}.started").write_text(json.dumps(self.points))
        deadline = time.monotonic() + 60
        while len(list(Path().glob("*.started"))) < PROCESSES:
            assert time.monotonic() < deadline, "a process got no trial"
            time.sleep(0.01)
        if self._number == 0 and len(self.points) == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def main(protocol: Any) -> None:
    torch.set_num_threads(1)
    grid = GRID if protocol == "paper" else None
    children = []
    for number in range(PROCESSES):
        child = os.fork()
        if child == 0:
            on_round = InOneOfSeveral(number)
            tuning = small_tune(grid=grid, protocol=protocol, trials=TRIALS, on_round=on_round)
            found = [[point, result.score] for point, result in scores(tuning.trials)]
            Path(f"{number}.found").write_text(json.dumps(found))
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [-signal.SIGKILL, 0, 0], codes


if __name__ == "__main__":
    main(sys.argv[1])
