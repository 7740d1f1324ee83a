"""Table 1 with Figure 3: rounds to a target accuracy, FedExP and three baselines."""

from __future__ import annotations

from collections.abc import Sequence

from fedexp.reproduce import measures
from fedexp.reproduce.measures import FINAL, ROUNDS, Values, Verdict, final_loss, grouped, ratio
from fedexp.reproduce.output import ALL, Groups, figure_title, task_figure
from fedexp.reproduce.published import Column, Table, Value, best, by_task, target, text_of
from fedexp.reproduce.study import Findings, Plan, Result, Study

TIMES = "times FedExP"
ALGORITHMS = ("fedexp", "fedavg", "scaffold", "fedadagrad")
HARD = ("cifar10", "cifar100", "cinic10")
ALIKE = 2  # points; in Table 5, after 2,000 rounds, the two are less than one apart
COLUMNS = (
    Column(ROUNDS, "rounds", "table1-rounds"),
    Column(TIMES, "times", "table1-ratio"),
    Column(FINAL, "%"),
)


def measure(plan: Plan, results: Sequence[Result]) -> Findings:
    """Rounds to target beside the paper's, and what the paper says of them."""
    lines = measures.reach(results, plan.rounds, "fedexp", TIMES)
    rounds, ends = by_task(lines, ROUNDS), by_task(lines, FINAL)
    hard, groups = measures.only(ends, HARD), grouped(results)
    checks = (
        *measures.each("table1", "fastest", rounds, _fastest),
        *measures.each("table1", "speedup", rounds, _speedup),
        *measures.each("table1", "scaffold", hard, measures.not_above("scaffold", "fedavg")),
        *measures.each("table1", "margin", hard, _margin),
        *measures.each("table1", "adagrad", hard, _alike),
        *measures.each("table1", "loss", measures.only(_losses(groups), ("emnist",)), _lower_loss),
    )
    targets = {task: target(task) for task in groups}
    title = figure_title(plan)
    return Findings(
        Table(COLUMNS, lines), checks, lambda: task_figure(groups, title, ALL, targets=targets)
    )


_fastest = measures.leads("fedexp", True, "rounds", ALGORITHMS)


def _speedup(values: Values) -> Verdict:
    """What is not reached counts as more than the rounds of the run."""
    if not {"fedexp", "fedavg"} <= values.keys():
        return None, "no run of both"
    ours, theirs = values["fedexp"], values["fedavg"]
    factor = ratio(theirs, ours)
    if factor is None or factor.mean is None:
        return None if theirs.more else False, "FedExP did not get there"
    seen = f"{text_of(factor, 'times').removesuffix('x')} times"
    return None if factor.more and factor.mean < 1.4 else factor.mean >= 1.4, seen


def _margin(values: Values) -> Verdict:
    others = {name: value for name, value in values.items() if name != "fedexp"}
    closest, ours = best(others, lowest=False), values.get("fedexp", Value(None)).mean
    if closest is None or ours is None:
        return None, "no number"
    points = ours - (others[closest].mean or 0.0)
    share = 100 * points / (others[closest].mean or 1.0)
    seen = f"{points:+.2f} points, {share:+.1f} % of {closest}'s"
    if share < 10 and points < 10:
        return False, seen
    missing = [name for name in ALGORITHMS if name not in values]  # could be closer
    return (None, f"{seen}; no run of {' and '.join(missing)}") if missing else (True, seen)


def _alike(values: Values) -> Verdict:
    mine, theirs = (values.get(name, Value(None)).mean for name in ("fedadagrad", "fedavg"))
    if mine is None or theirs is None:
        return None, "no number"
    return abs(mine - theirs) <= ALIKE, f"{mine:.2f}% and {theirs:.2f}%"


def _losses(groups: Groups) -> dict[str, Values]:
    return {task: {n: final_loss(runs) for n, runs in own.items()} for task, own in groups.items()}


def _lower_loss(values: Values) -> Verdict:
    mine, theirs = (values.get(name, Value(None)).mean for name in ("scaffold", "fedexp"))
    if mine is None or theirs is None:
        return None, "no number"
    return mine < theirs, f"{mine:.3g} and {theirs:.3g}"


STUDY = Study(
    name="table1",
    title="Table 1 and Figure 3: rounds to a target test accuracy",
    needs="a GPU",
    rounds=500,
    seeds=measures.SEEDS,
    arms=measures.arms(*ALGORITHMS),
    measure=measure,
    remarks=(
        "rounds to target: the mean over seeds of the first evaluation that reaches it",
        measures.TAU,
    ),
)
