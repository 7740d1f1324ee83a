"""What the document says of runs whose curves are known."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from tools.results import again, headline, levels, runs_table, sections, side_by_side, why
from tools.results.build import BLOCKS
from tools.results.gather import Results

from fedexp.cli.main import build_parser
from fedexp.reproduce import figure1
from fedexp.runs import StoredRun
from tests.helpers.archives import fabricated

HITS = {"fedexp": 200, "fedavg": 300, "scaffold": 310, "fedadagrad": 290}


def table1(task: str = "cifar10", seeds: int = 2, **more: Any) -> list[StoredRun]:
    return [
        fabricated("table1", task, name, seed, hit + 10 * seed, **more)
        for name, hit in HITS.items()
        for seed in range(seeds)
    ]


def diverged(run: StoredRun, at: int) -> StoredRun:
    result = {**(run.result or {}), "status": "diverged", "diverged_at": at}
    return replace(run, rows=run.rows[: at - 1], result=result)


def test_ours_stand_beside_the_papers() -> None:
    released = [fabricated("table1", "cifar10", "fedexp", 0, 400, mode="authors-code")]
    text = side_by_side.table1(Results((*table1(), *released)))
    lines = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert lines["| FedExP"] == (
        "| FedExP | 205 ± 7.1 | 200, 210 | 267 | -23 % | 1.49x | 1.62x | 90.00% ± 0.00 | - | 2 |"
    )
    assert "| 315 ± 7.1 | 310, 320 | 429 | -27 % | 0.97x | 1.01x |" in lines["| SCAFFOLD"]
    assert lines["| FedExP, mode authors-code"].endswith(
        "| 400 | 400 | - | - | - | - | 90.00% | - | 1 |"
    )
    assert "- 2 seeds instead of 5" in text
    assert "### CIFAR-100: 40 % test accuracy\n\nNo runs yet." in text


def test_a_speed_up_is_over_fedavg_in_the_same_mode() -> None:
    released = [
        fabricated("table1", "cifar10", name, 0, hit, mode="authors-code")
        for name, hit in {"fedexp": 200, "fedavg": 250}.items()
    ]
    text = side_by_side.table1(Results((*table1(), *released)))
    assert "| FedExP, mode authors-code | 200 | 200 | - | - | 1.25x |" in text


def test_the_headline_has_a_line_a_task_and_names_the_rest() -> None:
    text = headline.headline(Results(tuple(table1())))
    assert text.splitlines() == [
        "- **CIFAR-10**, 72 % test accuracy, 2 seeds: FedExP 205 rounds, FedAvg 305 rounds, which "
        "is **1.49 times** as many. The paper: 267 and 434, 1.62 times.",
        "",
        "Not run yet: EMNIST, CIFAR-100, CINIC-10.",
    ]


def test_seeds_that_do_not_get_there_are_counted() -> None:
    runs = table1("emnist", clients=294)
    at = next(i for i, run in enumerate(runs) if run.spec["algorithm"] == "fedavg")
    runs[at] = fabricated("table1", "emnist", "fedavg", 0, None, clients=294)
    text = headline.headline(Results(tuple(runs)))
    assert "FedAvg more than 405 rounds (1/2 seeds got there), which is **>1.98 times**" in text
    assert "EMNIST has 294 writers here instead of 3,400." in text
    runs[at] = diverged(runs[at], 30)
    table = side_by_side.table1(Results(tuple(runs)))
    assert "| FedAvg | >405 (1/2 seeds) | diverged, 310 |" in table
    assert "| >1.98x | 1.76x |" in table


def test_fedexp_that_does_not_get_there_is_reported_as_it_is() -> None:
    runs = [fabricated("table1", "cifar10", name, 0, hit) for name, hit in HITS.items()]
    runs[0] = fabricated("table1", "cifar10", "fedexp", 0, None, 0.5)
    results = Results(tuple(runs))
    assert "FedExP more than 500 rounds, FedAvg 300 rounds. The paper" in headline.headline(results)
    assert "| 72 % on CIFAR-10 | 300 | >500 | - | 1.62x | 1 |" in headline.readme(results)
    failed = sections.verdicts(results).split("**Does not agree with the paper**")[1]
    assert "CIFAR-10: FedExP needs the fewest rounds (Table 1): **no** (>500; fedadagrad" in failed
    assert "or more (sec. 6): **no** (FedExP did not get there)" in failed


def test_both_meanings_of_eps_are_compared_where_both_were_run() -> None:
    assert "not been run in both modes" in why.eps_modes(Results(tuple(table1())))
    released = [fabricated("table1", "cifar10", "fedexp", 0, 400, mode="authors-code")]
    text = why.eps_modes(Results((*table1(), *released)))
    assert "| CIFAR-10 | paper | 205 ± 7.1 | 267 | 90.00% ± 0.00 | 1.50 | 1.50 | 25.0% |" in text
    assert "| CIFAR-10 | authors-code | 400 | 267 | 90.00% | 1.50 | 1.50 | 25.0% |" in text


def test_other_accuracies_are_as_far_from_the_target_on_every_task() -> None:
    text = levels.levels(Results((*table1(end=0.75), *table1("cifar100", 1))))
    assert "| CIFAR-10, rounds to | 52 % | 62 % | 67 % | 72 % | 74 % | 76 % |" in text
    first, second = (line for line in text.splitlines() if line.startswith("| FedExP"))
    assert first.endswith("| 205 ± 7.1 | 205 ± 7.1 | >500 (0/2 seeds) |")
    assert second == "| FedExP | 200 | 200 | 200 | 200 | 200 | 200 |"


def test_a_seed_that_came_to_nothing_is_not_hidden_in_a_mean() -> None:
    ends = {0: 0.9, 1: 0.08, 3: 0.9}
    runs = [
        fabricated("scaffold-exp", "cifar10", "scaffold-exp", seed, end=end)
        for seed, end in ends.items()
    ]
    runs.append(fabricated("scaffold-exp", "cifar10", "fedexp", 0, end=0.8))
    text = sections.section(Results(tuple(runs)), "scaffold-exp")
    assert "| CIFAR-10 | SCAFFOLD-ExP | 90.00% | 8.00% | 90.00% |" in text
    assert "| CIFAR-10 | FedExP | 80.00% |  |  |" in text
    assert "| seed 0 | seed 1 | seed 3 |" in text


def test_figure_1_is_a_grid() -> None:
    arms = [arm.series for arm in figure1.arms("emnist")]
    runs = [fabricated("figure1", "emnist", series, hit=1, end=0.5) for series in arms]
    runs[0] = diverged(runs[0], 7)
    text = sections.section(Results(tuple(runs)), "figure1")
    assert "| 0.1 | diverged (5.8) | 50.0 (8.2) | 50.0 (42) | 50.0 (55) | 50.0 (9.1) |" in text


def test_commands_make_these_runs_and_no_others() -> None:
    extra = fabricated("table1", "cifar10", "fedexp", 2)
    released = fabricated("table1", "cifar10", "fedexp", 0, mode="authors-code")
    text = again.rerun(Results((*table1(), extra, released)))
    commands = text.splitlines()[1:-1]
    assert commands[0] == (
        "fedexp reproduce table1 --task cifar10 --seeds 2 --device cuda --precision bf16"
    )
    parsed = [build_parser().parse_args(shlex.split(line)[1:]) for line in commands]
    assert [(p.command, getattr(p, "seed", None), p.mode) for p in parsed] == [
        ("reproduce", None, "paper"),
        ("run", 0, "authors-code"),
        ("run", 2, "paper"),
    ]


def test_superseded_runs_are_marked_until_they_are_run_again() -> None:
    others = [run for run in table1() if run.spec["algorithm"] != "fedadagrad"]
    old, new = (
        [fabricated("table1", "cifar10", "fedadagrad", s, 290, options=form) for s in range(2)]
        for form in ({"server.form": "reddi"}, {"server.form": "standard"})
    )
    results = Results((*others, *old))
    remark = "run with the earlier start of v; to be run again"
    assert f"- fedadagrad {remark}" in side_by_side.table1(results)
    assert "FedAdagrad |" not in side_by_side.table1(results) + levels.levels(results)
    assert f"CIFAR-10: fedadagrad {remark}" in sections.missing(results)
    assert runs_table.runs(results).count(f"finished; {remark}") == 2
    unsure = sections.verdicts(results).split("**Cannot be told from these runs**")[1]
    assert "CIFAR-10: FedAdagrad ends almost where FedAvg does" in unsure
    # One command still makes all of them, in their new form; then nothing is marked.
    command = "fedexp reproduce table1 --task cifar10 --seeds 2 --device cuda --precision bf16"
    for archive in (results, Results((*others, *old, *new)), Results((*others, *new))):
        assert again.rerun(archive).splitlines()[1] == command
    replaced = Results((*others, *new))
    assert all(remark not in make(replaced) for make in BLOCKS.values())
    assert "| FedAdagrad | 290" in side_by_side.table1(replaced)


def test_every_run_is_in_the_table_with_its_machine() -> None:
    runs = table1(seeds=1)
    other = {**runs[0].environment, "device": "another", "started": "2027-01-01T00:00:00+0000"}
    results = Results((*runs[1:], replace(runs[0], environment={**other, "note": "in haste"})))
    assert "4 runs, 4.0 minutes in all." in runs_table.machines(results)
    assert "| B | another |" in runs_table.machines(results)
    assert "| 1 | 1.0 | 2027-01-01 | in haste |" in runs_table.machines(results)
    lines = runs_table.runs(results).splitlines()
    assert len(lines) == 2 + len(runs)
    assert (
        "| CIFAR-10 | FedExP |  | paper | 0 | 500 | finished | 90.00% | bf16 | 60.0 | B |" in lines
    )


def test_an_empty_archive_has_words_for_every_block() -> None:
    assert all(make(Results(())) for make in BLOCKS.values())
    assert "no runs on EMNIST, CIFAR-10" in sections.missing(Results(()))
    partial = Results(tuple(table1()[:1]))
    assert "CIFAR-10: fedavg, scaffold, fedadagrad not run" in sections.missing(partial)


def test_seeds_that_others_have_are_missed() -> None:
    released = fabricated("table1", "cifar10", "fedexp", 1, mode="authors-code")
    fewer = [run for run in table1() if run.spec["id"] != table1()[-1].spec["id"]]
    text = sections.missing(Results((*fewer, released)))
    assert "`table1`, mode authors-code: CIFAR-10: FedExP without seed 0" in text
    assert "CIFAR-10: FedAdagrad without seed 1" in text
    assert "without" not in sections.missing(Results(tuple(table1())))
