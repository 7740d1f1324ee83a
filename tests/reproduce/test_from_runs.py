"""`fedexp reproduce --from`: a study from stored runs, without data and training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedexp import catalogue
from fedexp.cli.main import main
from fedexp.errors import UsageError
from fedexp.reproduce import STUDIES, accuracy_studies
from fedexp.reproduce.from_runs import plan_from
from fedexp.reproduce.study import Plan, Request
from fedexp.runs import StoredRun
from tests.helpers.archives import fabricated, store


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make building a task fail, and hide all images."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a task was built")

    monkeypatch.setattr(catalogue, "build_task", refuse)
    monkeypatch.setenv("FEDEXP_DATA", str(tmp_path / "none"))


def table1(task: str = "cifar10", **more: Any) -> list[StoredRun]:
    """FedExP at round 200, the others at 300, two seeds each."""
    arms = {"fedexp": 200, "fedavg": 300, "scaffold": 300, "fedadagrad": 300}
    return [
        fabricated("table1", task, name, seed, hit, **more)
        for name, hit in arms.items()
        for seed in (0, 1)
    ]


def test_an_archive_gives_the_table_of_its_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path / "archive", [*table1(), *table1("cifar100", end=0.3)])
    out = tmp_path / "out"
    assert (
        main(["reproduce", "table1", "--from", str(tmp_path / "archive"), "--out", str(out)]) == 0
    )
    summary = json.loads((out / "summary.json").read_text())
    lines = {(line["task"], line["algorithm"]): line for line in summary["lines"]}
    assert lines["cifar10", "fedexp"]["rounds to target"]["ours"]["mean"] == 200
    assert lines["cifar10", "fedavg"]["times FedExP"]["ours"]["mean"] == 1.5
    assert lines["cifar10", "fedavg"]["rounds to target"]["difference"] == 300 - 434
    assert lines["cifar100", "fedexp"]["rounds to target"]["ours"]["more"]
    assert (summary["device"], summary["precision"]) == ("cuda", "bf16")
    printed = capfd.readouterr().out
    assert "cifar10: 2 seeds instead of 5" in printed
    assert "cinic10 is left out: it has not been run" in printed
    assert (
        "cifar10: FedAvg needs at least 1.4 times FedExP's rounds: yes over 2 seeds (1.50"
        in printed
    )


def test_what_is_missing_is_listed_and_not_judged() -> None:
    runs = [run for run in table1() if run.spec["algorithm"] not in ("scaffold", "fedadagrad")]
    plan, results = plan_from(STUDIES["table1"], Request(), runs[:-1])
    assert plan.shrunk == (
        "cifar10: fedexp (participants x eps), fedexp (participants x decaying eps), scaffold, "
        "fedadagrad not run",
        "cifar10: seeds fedexp 2, fedavg 1 instead of 5",
    )
    checks = {check.claim.text: check for check in plan.study.measure(plan, results).checks}
    fastest, *_ = checks.values()
    assert (fastest.holds, fastest.seen) == (None, "no run of scaffold and fedadagrad")
    assert [check.holds for check in checks.values()] == [None, True, False, None, None]


def test_a_lead_over_the_closest_baseline_needs_all_of_them() -> None:
    ends = {"fedexp": 0.9, "fedavg": 0.7, "scaffold": 0.6}
    runs = [fabricated("table1", "cifar10", name, end=end) for name, end in ends.items()]
    plan, results = plan_from(STUDIES["table1"], Request(), runs)
    checks = {check.claim.text: check for check in plan.study.measure(plan, results).checks}
    (margin,) = (check for text, check in checks.items() if "closest baseline" in text)
    assert margin.holds is None
    assert margin.seen == "+20.00 points from fedavg; no run of fedadagrad"


def test_a_claim_is_judged_over_the_seeds_that_all_its_series_have() -> None:
    hits = {("fedexp", 0): 200, ("fedexp", 1): 400, ("fedavg", 0): 300}
    runs = [fabricated("table1", "cifar10", name, s, hit) for (name, s), hit in hits.items()]
    plan, results = plan_from(STUDIES["table1"], Request(), runs)
    checks = plan.study.measure(plan, results).checks
    (speedup,) = (each for each in checks if each.claim.text.startswith("FedAvg needs"))
    assert (speedup.holds, speedup.seen, speedup.seeds) == (True, "1.50 times", 1)
    apart = [
        fabricated("table1", "cifar10", name, s) for s, name in enumerate(("fedexp", "fedavg"))
    ]
    plan, results = plan_from(STUDIES["table1"], Request(), apart)
    for check in plan.study.measure(plan, results).checks[:2]:
        assert (check.holds, check.seen, check.seeds) == (None, "no seed in common", 0)


def test_a_margin_is_judged_in_points_and_not_in_percent_of_the_baseline() -> None:
    ends = {"fedexp": 0.49, "fedavg": 0.40, "scaffold": 0.3, "fedadagrad": 0.3}
    runs = [fabricated("table1", "cifar100", name, end=end) for name, end in ends.items()]
    plan, results = plan_from(STUDIES["table1"], Request(), runs)
    checks = plan.study.measure(plan, results).checks
    (margin,) = (check for check in checks if "closest baseline" in check.claim.text)
    assert (margin.holds, margin.seen) == (False, "+9.00 points from fedavg")


def test_one_run_that_is_faster_decides_the_claim() -> None:
    hits = {"fedexp": None, "fedavg": 300}
    runs = [fabricated("table1", "cifar10", name, hit=hit) for name, hit in hits.items()]
    plan, results = plan_from(STUDIES["table1"], Request(), runs)
    fastest, speedup, *_ = plan.study.measure(plan, results).checks
    assert (fastest.holds, speedup.holds) == (False, False)
    assert speedup.seen == "FedExP did not reach the target"


def test_partial_data_affect_their_own_task_only() -> None:
    runs = [*table1(), *table1("emnist", clients=294)]
    plan, results = plan_from(STUDIES["table1"], Request(), runs)
    assert (plan.comparable, plan.partial) == (True, ("emnist",))
    assert "EMNIST has 294 writers here instead of 3,400" in plan.shrunk
    table = plan.study.measure(plan, results).table
    gaps = {row[0]: row[4] for row in table.cells(plan.comparable, plan.partial)[::4]}
    assert gaps == {"emnist": "-", "cifar10": "-67"}
    _, rows = table.numbers(plan.comparable, plan.partial)
    assert {(row[0], row[-1]) for row in rows} == {("emnist", "no"), ("cifar10", "yes")}


def test_a_study_that_needs_all_its_arms_is_left_out_without_them() -> None:
    runs = [fabricated("figure1", "emnist", f"1, {lr}") for lr in ("0.3", "1")]
    for stored, reason in (
        (runs, "2 of its 25 settings have been run"),
        (runs[:1], "it has not been run"),  # a single setting is a run of another study
    ):
        plan, results = plan_from(STUDIES["figure1"], Request(), stored)
        assert (plan.tasks, results) == ((), [])
        assert plan.left_out == (f"emnist is left out: {reason}",)


def test_two_values_of_eps_make_a_table_and_a_single_one_is_of_another_study() -> None:
    runs = [fabricated("epsilon-table", "emnist", f"10^{exponent}") for exponent in ("-3", "-1")]
    plan, results = plan_from(STUDIES["epsilon-table"], Request(), runs)
    findings = plan.study.measure(plan, results)
    assert [line.series for line in findings.table.lines] == ["10^-3", "10^-1"]
    assert [(check.holds, check.seen) for check in findings.checks] == [
        (None, "2 of 5 values were run")
    ]
    assert plan_from(STUDIES["epsilon-table"], Request(), runs[:1])[0].tasks == ()


def test_runs_of_other_settings_do_not_belong() -> None:
    strangers = [
        fabricated("table1", "cifar10", "fedexp", **changed)
        for changed in (
            {"mode": "authors-code"},
            {"rounds": 20},
            {"set": {"server.eps": "1"}, "changed": ["server.eps"]},
            {"cohort": 5},
        )
    ]
    unfinished = replace(fabricated("table1", "cifar10", "fedexp"), result=None)
    stopped = fabricated("table1", "cifar10", "fedexp", stop_at=0.7)
    plan, _ = plan_from(STUDIES["table1"], Request(), [*strangers, unfinished, stopped])
    assert plan.tasks == ()
    plan, results = plan_from(STUDIES["table1"], Request(mode="authors-code"), strangers)
    assert [result.job.experiment.mode for result in results] == ["authors-code"]


def test_readings_of_eps_are_series_of_their_own_and_judged_apart() -> None:
    hits = {"fedexp": 320, "fedexp (participants x eps)": 180}
    readings = [fabricated("table1", "emnist", name, hit=hit) for name, hit in hits.items()]
    baselines = [run for run in table1("emnist") if run.spec["algorithm"] != "fedexp"]
    plan, results = plan_from(STUDIES["table1"], Request(), [*readings, *baselines])
    findings = plan.study.measure(plan, results)
    rows = {row[1]: row[2:5] for row in findings.table.cells(comparable=True)}
    assert rows["fedexp"] == ["320", "186", "+134"]
    assert rows["fedexp (participants x eps)"] == ["180", "186", "-6"]
    verdicts = {(c.reading, c.claim.text): c.holds for c in findings.checks if c.seeds}
    fastest = "FedExP needs the fewest rounds"
    assert verdicts["", fastest] is False
    assert verdicts["participants x eps", fastest] is True
    assert not [c for c in findings.checks if c.reading == "participants x decaying eps"]
    # A run of one reading is never taken for another, nor for one of mode authors-code.
    for name, options in {"fedexp": {}, **accuracy_studies.READINGS}.items():
        series = accuracy_studies.of_reading("fedexp", "" if name == "fedexp" else name)
        run = fabricated("table1", "emnist", series, set=dict(options))
        _, (own,) = plan_from(STUDIES["table1"], Request(), [run])
        assert own.job.series == series
        assert plan_from(STUDIES["table1"], Request(mode="authors-code"), [run])[1] == []


def test_mode_authors_code_has_its_own_reading_only() -> None:
    study = STUDIES["table1"]
    plan = Plan(study, Request(mode="authors-code"), study.tasks, study.rounds)
    assert [arm.series for arm in plan.arms("emnist")] == [*accuracy_studies.TABLE1_ALGORITHMS]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 0, "precision": "float32"}, "the same seed twice"),
        ({"seed": 1, "options": {"server.eps": 0.1}}, "differ in server.eps"),
        ({"seed": 1, "clients": 50}, "differ in clients"),
    ],
)
def test_ambiguous_runs_are_refused(changed: dict[str, Any], message: str) -> None:
    pair = [
        fabricated("table1", "cifar10", "fedexp"),
        fabricated("table1", "cifar10", "fedexp", **changed),
    ]
    with pytest.raises(UsageError, match=message):
        plan_from(STUDIES["table1"], Request(), pair)
    if "precision" in changed:
        plan, _ = plan_from(STUDIES["table1"], Request(precision="float32"), pair)
        assert plan.arithmetic == "float32"


def test_algorithms_are_compared_on_the_same_clients() -> None:
    pair = [
        fabricated("table1", "emnist", name, clients=clients)
        for name, clients in {"fedexp": 294, "fedavg": 3400}.items()
    ]
    with pytest.raises(UsageError, match="have different clients"):
        plan_from(STUDIES["table1"], Request(), pair)


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ([], "fedexp reproduce table1"),
        (["--seeds", "2"], "leave --seeds out"),
        (["--task", "mnist"], "did you mean emnist?"),
    ],
)
def test_mistakes_get_one_line(
    more: list[str], remedy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path, [fabricated("momentum", "cifar10", "fedadam")])
    words = ["reproduce", "table1", "--from", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*words, *more]) == 2
    _, err = capfd.readouterr()
    assert remedy in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def resolved(run: StoredRun, iterates: int, changed: list[str], **typed: str) -> StoredRun:
    """Return the run with these options, `average_last` being `iterates`."""
    options = {"server.lr": 1.0, "average_last": iterates}
    spec = {**run.spec, "set": typed, "changed": changed, "options": options}
    return replace(run, spec=spec)


@pytest.mark.parametrize("typed", [{}, {"average_last": "1"}])
def test_an_option_named_at_its_default_is_no_option(typed: dict[str, str]) -> None:
    run = resolved(fabricated("table1", "cifar10", "fedavg"), 1, [], **typed)
    plan = STUDIES["table1"], Request(tasks=("cifar10",))
    assert len(plan_from(*plan, [run])[1]) == 1
    assert plan_from(*plan, [resolved(run, 1, ["server.lr"], lr="3")])[1] == []


def test_an_arm_that_names_a_default_takes_a_run_that_does_not() -> None:
    arms = {
        "fedavg, last iterate": (1, []),
        "fedavg, mean of the last two": (2, ["average_last"]),
        "fedexp, last iterate": (1, ["average_last"]),
        "fedexp, mean of the last two": (2, []),
    }
    runs = [
        resolved(fabricated("iterate-averaging", "cifar10-cnn", series), *own)
        for series, own in arms.items()
    ]
    _, results = plan_from(STUDIES["iterate-averaging"], Request(), runs)
    assert [result.job.series for result in results] == list(arms)


def test_of_two_runs_of_one_setting_a_study_takes_the_one_that_was_typed_for_it() -> None:
    typed = fabricated("epsilon-table", "emnist", "10^-1")
    untyped = resolved(typed, 2, [])
    spec = {**untyped.spec, "options": typed.spec["options"]}
    untyped = replace(untyped, spec=spec, folder=Path("untyped"))
    typed = replace(typed, spec={**typed.spec, "changed": []})
    others = [
        fabricated("epsilon-table", "emnist", f"10^{exponent}")
        for exponent in ("-3", "-2.5", "-2", "-1.5")
    ]
    for name, run in (("epsilon-table", typed), ("table1", untyped)):
        request = Request(tasks=("emnist",))
        _, results = plan_from(STUDIES[name], request, [untyped, typed, *others])
        assert [r.outcome.folder for r in results].count(run.folder) == 1
