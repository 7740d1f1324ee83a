"""Three processes that tune one study; torch is imported once, and each process is a fork.

shared_study.py STUDY PROTOCOL    the first process is killed in its second trial

Each writes beside the study which trials it started (NUMBER.started), and those that survive what
they found (NUMBER.found).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from fedexp.tuning.search import Protocol, Study, TrialRunner, tune
from tests.helpers.tuning import StartedTrials, small_study

PROCESSES = 3
GRID = {"server.lr": (1.0, 3.0, 10.0), "local.lr": (0.01, 0.03, 0.1)}
RANGES = {"server.lr": (1.0, 10.0), "local.lr": (0.01, 0.1)}
TRIALS = 9


class InOneOfSeveral(StartedTrials):
    """Waits until every process has a trial; kills the first process in its second trial."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__()
        self._folder, self._number = folder, number

    def on_start(self) -> None:
        (self._folder / f"{self._number}.started").write_text(json.dumps(self.points))
        deadline = time.monotonic() + 60
        while len(list(self._folder.glob("*.started"))) < PROCESSES:
            assert time.monotonic() < deadline, "a process got no trial"
            time.sleep(0.01)
        if self._number == 0 and len(self.points) == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def work(study: Study, number: int) -> None:
    runner = TrialRunner(progress=InOneOfSeveral(study.path.parent, number))
    found = [[each.point, each.result.score] for each in tune(study, runner)]
    (study.path.parent / f"{number}.found").write_text(json.dumps(found))


def main(path: Path, protocol: Protocol) -> None:
    torch.set_num_threads(1)
    values = RANGES if protocol == "free" else GRID
    study = small_study(path, protocol=protocol, values=values, trials=TRIALS)
    children = []
    for number in range(PROCESSES):
        child = os.fork()
        if child == 0:
            work(study, number)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [-signal.SIGKILL, 0, 0], codes


if __name__ == "__main__":
    main(Path(sys.argv[1]), "free" if sys.argv[2] == "free" else "paper")
