"""The studies of accuracy curves, Figure 1 and Figure 6: their runs, tables and checks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from fedexp.analysis.tables import FORMATS
from fedexp.reproduce import STUDIES
from fedexp.reproduce.output import render, summary
from fedexp.reproduce.published import Value
from fedexp.reproduce.study import Findings, Job, Plan, Request, Result, jobs_of
from fedexp.runs.spec import Outcome

TRAINED = [name for name in STUDIES if name not in ("toy", "synthetic")]


def planned(name: str, request: Request | None = None, comparable: bool = True) -> Plan:
    """Return the plan of a study without reading data."""
    study = STUDIES[name]
    bare = Plan(study, request or Request(), study.tasks, study.rounds, comparable=comparable)
    jobs = tuple(job for task in study.tasks for job in jobs_of(bare, task))
    return Plan(study, bare.request, study.tasks, study.rounds, jobs, comparable=comparable)


def run(job: Job, accuracies: Sequence[float | None], diverged_at: int | None = None) -> Result:
    rows = [
        {"test_accuracy": a, "train_accuracy": a, "train_loss": None if a is None else 1 - a}
        for a in accuracies
    ]
    for row in rows:
        row["server_lr"] = 1.5
    return Result(job, Outcome({"seed": job.experiment.seed}, rows, 1.0, diverged_at))


def rising(to: float, rounds: int, every: int = 5) -> list[float | None]:
    """Return a curve from 0 to `to` that is evaluated every `every` rounds."""
    return [to * r / rounds if r % every == 0 else None for r in range(1, rounds + 1)]


def line(findings: Findings, task: str, series: str) -> dict[str, Value]:
    (found,) = (x for x in findings.table.lines if (x.task, x.series) == (task, series))
    return dict(found.values)


@pytest.mark.parametrize(
    ("name", "runs", "rounds", "seeds"),
    [
        ("figure1", 25, 50, {"emnist": 1}),
        ("table1", 210, 500, {"emnist": 20, "cifar10": 5, "cifar100": 5, "cinic10": 5}),
        ("iterate-averaging", 4, 500, {"cifar10-cnn": 1}),
        ("epsilon-table", 20, 500, dict.fromkeys(("emnist", "cifar10", "cifar100", "cinic10"), 1)),
        (
            "long-run",
            65,
            2000,
            {"synthetic": 1, "emnist": 3, "cifar10": 3, "cifar100": 3, "cinic10": 3},
        ),
        ("scaffold-exp", 165, 500, {"cifar10": 5, "emnist": 20}),
        ("momentum", 18, 500, {"cifar10": 3, "cifar100": 3}),
    ],
)
def test_the_runs_are_those_of_the_paper(
    name: str, runs: int, rounds: int, seeds: dict[str, int]
) -> None:
    jobs = planned(name).jobs
    assert len(jobs) == len({repr(job.experiment) for job in jobs}) == runs == STUDIES[name].runs()
    assert {job.experiment.rounds for job in jobs} == {rounds}
    for task, number in seeds.items():
        assert {job.experiment.seed for job in jobs if job.task == task} == set(range(number))


def test_epsilon_and_figure_1_vary_what_the_paper_varies() -> None:
    eps = {
        (job.task, job.experiment.options["local.lr"]): job for job in planned("epsilon-table").jobs
    }
    assert {task: float(lr) for task, lr in eps} == {
        "emnist": pytest.approx(10**-0.5),
        "cifar10": 0.01,
        "cifar100": 0.01,
        "cinic10": 0.01,
    }
    values = [float(j.experiment.options["server.eps"]) for j in planned("epsilon-table").jobs[:5]]
    assert values == pytest.approx([10**-3, 10**-2.5, 10**-2, 10**-1.5, 10**-1])
    grid = {tuple(map(float, j.experiment.options.values())) for j in planned("figure1").jobs}
    assert grid == set(product((0.1, 0.3, 1, 3, 10), (0.01, 0.03, 0.1, 0.3, 1)))
    assert {job.experiment.algorithm for job in planned("figure1").jobs} == {"fedavg"}


def test_table_1_counts_rounds_ratios_and_differences() -> None:
    plan = planned("table1", Request(seeds=2))
    ends = {"fedexp": 1.0, "fedavg": 0.8, "scaffold": 0.5, "fedadagrad": 0.79}
    results = [
        run(job, rising(ends[job.series], 500))
        for job in plan.jobs
        if job.task == "cifar10" and job.series in ends
    ]
    findings = plan.study.measure(plan, results)
    exp = line(findings, "cifar10", "fedexp")
    assert exp["rounds to target"] == Value(360.0, 0.0)
    assert exp["smoothed"] == Value(370.0, 0.0)  # a straight line, averaged over 5 evaluations
    assert exp["final test accuracy"].mean == pytest.approx(100)
    avg = line(findings, "cifar10", "fedavg")
    assert avg["times FedExP"] == Value(1.25)
    never = line(findings, "cifar10", "scaffold")
    assert never["rounds to target"] == Value(500.0, more=True, remark="0/2 seeds")
    assert never["times FedExP"].more
    cells = {row[1]: row[2:] for row in findings.table.cells(comparable=True)}
    assert cells["fedexp"][:3] == ["360 ± 0", "267", "+93"]
    assert cells["fedavg"][4:7] == ["1.25x", "1.62x", "-0.37x"]
    assert cells["scaffold"][:3] == [">500 (0/2 seeds)", "429", "-"]
    assert findings.table.cells(comparable=False)[0][4] == "-"
    headers, rows = findings.table.numbers(comparable=True)
    first = dict(zip(headers, rows[0], strict=True))
    assert first["rounds to target"] == "360.0"
    assert first["rounds to target difference"] == "93.0"
    assert dict(zip(headers, rows[2], strict=True))["rounds to target at least"] == "True"
    verdicts = [check.holds for check in findings.checks]
    # fastest; below 1.4 times; margin; SCAFFOLD; FedAdagrad
    assert verdicts == [True, False, True, True, True]


def test_ratios_are_over_the_seeds_that_both_have() -> None:
    plan = planned("scaffold-exp", Request(seeds=2))
    ends = {("scaffold-exp", 0): 0.72, ("fedexp", 0): 1.44, ("fedexp", 1): 0.9}
    results = [
        run(job, rising(ends[job.series, job.experiment.seed], 500))
        for job in plan.jobs
        if job.task == "cifar10" and (job.series, job.experiment.seed) in ends
    ]
    values = line(plan.study.measure(plan, results), "cifar10", "fedexp")
    assert values["rounds to target"].mean == (250 + 400) / 2
    assert values["times SCAFFOLD-ExP"].mean == 250 / 500


@pytest.mark.parametrize(("adagrad", "scaffold", "holds"), [(0.79, 0.9, True), (0.7, 0.7, False)])
def test_claims_about_baselines_are_checked(adagrad: float, scaffold: float, holds: bool) -> None:
    plan = planned("table1", Request(seeds=1))
    ends = {"fedexp": 0.8, "fedavg": 0.8, "scaffold": scaffold, "fedadagrad": adagrad}
    results = [run(job, rising(ends[job.series], 500)) for job in plan.jobs if job.series in ends]
    checks = plan.study.measure(plan, results).checks
    alike = [(check.task, check.holds) for check in checks if "FedAdagrad" in check.claim.text]
    assert alike == [(task, holds) for task in ("cifar10", "cifar100", "cinic10")]
    losses = [(check.task, check.holds) for check in checks if "training loss" in check.claim.text]
    assert losses == [("emnist", holds)]


def test_figure_1_gives_no_more_digits_than_the_figure_has() -> None:
    plan = planned("figure1")
    assert {job.experiment.evaluate_every for job in plan.jobs} == {50}
    findings = plan.study.measure(plan, [run(job, [0.5]) for job in plan.jobs])
    assert findings.table.cells(comparable=True)[0][2:] == ["50.00%", "5.8%", "+44.20%"]
    assert findings.table.headers()[3] == "paper (approx.)"
    assert [check.holds for check in findings.checks] == [False, False]


def test_a_seed_that_misses_the_target_gives_a_lower_bound() -> None:
    plan = planned("table1", Request(seeds=2))
    results = [
        run(job, rising(0.9 if job.experiment.seed else 0.3, 500))
        for job in plan.jobs
        if job.task == "cifar10"
    ]
    found = line(plan.study.measure(plan, results), "cifar10", "fedexp")["rounds to target"]
    assert (found.mean, found.more, found.remark) == ((500 + 400) / 2, True, "1/2 seeds")


def test_the_long_run_pools_seeds_and_the_last_twenty_rounds() -> None:
    plan = planned("long-run")
    results = []
    for job in plan.jobs:
        curve = [0.1] * 1980 + [0.80 + 0.01 * job.experiment.seed] * 20
        results.append(run(job, curve))
    value = line(plan.study.measure(plan, results), "emnist", "fedexp")["test accuracy"]
    assert value.mean == pytest.approx(81)
    assert value.spread == pytest.approx(np.std([80.0] * 20 + [81.0] * 20 + [82.0] * 20, ddof=1))
    assert "test accuracy" not in line(plan.study.measure(plan, results), "synthetic", "fedexp")


def test_iterate_averaging_compares_roughness() -> None:
    plan = planned("iterate-averaging")
    rough = [0.5 + 0.1 * (r % 2) for r in range(50)]
    shapes: dict[str, list[float | None]] = {
        "fedexp, last iterate": [*rough],
        "fedexp, mean of the last two": [0.6] * 50,
    }
    results = [run(job, shapes.get(job.series, [0.5] * 50)) for job in plan.jobs]
    findings = plan.study.measure(plan, results)
    assert [check.holds for check in findings.checks] == [True, True, True]
    change = line(findings, "cifar10-cnn", "fedexp, last iterate")["mean change per round"]
    assert change.mean == pytest.approx(10)
    swapped = {
        "fedexp, last iterate": shapes["fedexp, mean of the last two"],
        "fedexp, mean of the last two": shapes["fedexp, last iterate"],
    }
    results = [run(job, swapped.get(job.series, [0.5] * 50)) for job in plan.jobs]
    assert [c.holds for c in plan.study.measure(plan, results).checks] == [False, False, True]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("diverges", [False, True])
def test_every_study_reports_and_draws(name: str, diverges: bool) -> None:
    plan = planned(name, Request(seeds=1))
    results = [
        run(job, rising(0.02 + 0.9 / (k % 7 + 1), 20), 21 if diverges and k % 2 else None)
        for k, job in enumerate(plan.jobs)
    ]
    findings = plan.study.measure(plan, results)
    assert len(findings.table.lines) == len(plan.jobs)
    texts = {how: render(plan, findings, how) for how in FORMATS}
    assert all(job.series.split(",")[0] in texts["text"] for job in plan.jobs)
    assert texts["latex"].rstrip().endswith(r"\end{tabular}")
    assert json.dumps(summary(plan, findings), allow_nan=False)
    assert findings.checks
    assert findings.draw().get_axes()
    if diverges and name not in ("iterate-averaging",):
        assert "diverged" in texts["text"]
