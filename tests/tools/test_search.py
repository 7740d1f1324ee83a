"""Records of searches, and the table of EMNIST runs with the values that one found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.results import search
from tools.results.archive import Archive

from fedexp.runs import StoredRun
from tests.helpers.archives import fabricated

RECORD = ["algorithm,local_lr,option,value,train_accuracy"] + [
    f"{name},{lr},{option},0.1,{score}"
    for name, option in {"fedexp": "server.eps", "fedavg": "server.lr"}.items()
    for lr, score in {0.01: 0.3, 0.316227766: 0.5, 1.0: 0.0}.items()
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / search.SEARCH).write_text("\n".join(RECORD))
    return tmp_path


def test_a_search_is_stored_and_its_best_trials_are_found(folder: Path) -> None:
    trials = search.load_search(folder)
    assert len(trials) == 6
    assert {name: trial.local_lr for name, trial in search.best_trials(trials).items()} == {
        "fedexp": 0.316227766,
        "fedavg": 0.316227766,
    }
    text = search.search_table(folder)
    assert "| FedExP | server.eps=0.1 | 30.0 % | **50.0 %** | diverged |" in text
    assert search.search_table(folder / "none") == search.tuned_table(Archive(()), folder / "none")


def tuned(name: str, option: str, seed: int, hit: int, **changed: Any) -> StoredRun:
    run = fabricated("table1", "emnist", name, seed, hit, clients=294)
    options = {"local.lr": 10**-0.5, option: 0.1}
    return replace(run, spec={**run.spec, "options": options, "changed": [option], **changed})


def test_a_reading_of_eps_is_searched_apart(folder: Path) -> None:
    record = [line.replace("fedexp", "fedexp (participants x eps)") for line in RECORD]
    (folder / search.SEARCH).write_text("\n".join(record))
    trials = [t for t in search.load_search(folder) if t.algorithm.startswith("fedexp")]
    printed = tuned("fedexp", "server.eps", 0, 50)
    options = {**printed.spec["options"], "server.eps_mode": "participants"}
    other = tuned("fedexp", "server.eps", 1, 50, options=options, changed=["server.eps_mode"])
    ((_, runs),) = search.tuned_runs(Archive((printed, other)), trials)
    assert runs == [other]


def test_tuned_runs_are_those_with_the_best_values(folder: Path) -> None:
    runs = [
        *(tuned("fedexp", "server.eps", seed, 50) for seed in range(2)),
        *(tuned("fedavg", "server.lr", seed, 100) for seed in range(2)),
        tuned("fedexp", "server.eps", 2, 10, changed=["server.eps_mode"]),
        tuned("fedexp", "server.eps", 3, 10, rounds=50),
        tuned("fedexp", "server.eps", 4, 10, options={"local.lr": 0.1, "server.eps": 0.1}),
    ]
    lines = search.tuned_table(Archive(tuple(runs)), folder).splitlines()
    values = "client step 0.316, server.eps=0.1"
    assert lines[2] == f"| FedExP | {values} | 50 ± 0 | 70 ± 0 | 2.00x | 90.00% ± 0.00 | 2 |"
    assert len(lines) == 4
