"""Clipping relative to the median: what it sums, where it is applied, and whom it stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedexp as fx
from fedexp.aggregate import Aggregate
from fedexp.clipping import (
    BELOW,
    CLIPPED,
    COUNTS,
    MEDIAN,
    UPDATE,
    WEIGHT,
    Limits,
    clipped_sums,
    follow,
    histogram,
    longest,
    median,
)
from fedexp.engine.simulation import ProcessGroup
from fedexp.errors import NonFiniteUpdateWarning, UsageError
from fedexp.privacy import CentralPrivacy, LocalPrivacy
from tests.engine.helpers import double_batch_norm, unequal
from tests.helpers.problems import vectors_task

WITHIN = 2 ** (1 / 16)  # a bin
RNG = np.random.default_rng(0)
LIMITS = Limits(2.0, {UPDATE: 1.0, WEIGHT: 1.5})


def updates(count: int = 7, dim: int = 5) -> Tensor:
    return torch.from_numpy(RNG.normal(size=(count, dim)))


def test_long_updates_and_large_weights_are_clipped_and_short_ones_keep_their_bits() -> None:
    deltas = torch.tensor([[3.0, 4.0], [0.6, 0.8]], dtype=torch.float64)
    sums = clipped_sums(deltas, [10.0, 1.0], {"work": torch.tensor([[7.0], [1.0]])}, LIMITS)
    # the first weighs twice the median after its own clip, so that its update has half the length
    weight, first = 3 * BELOW, torch.tensor([0.6, 0.8]) * BELOW
    torch.testing.assert_close(
        sums.update, (weight * first + deltas[1]).double(), rtol=1e-7, atol=0
    )
    assert sums.weight.item() == pytest.approx(weight + 1, rel=1e-15)
    assert sums.sq_norm.item() == pytest.approx(weight * BELOW**2 + 1, rel=1e-12)
    assert sums.extras["work"].item() == pytest.approx(7 * weight + 1)  # not as long as the model
    assert sums.extras[CLIPPED].item() == 1


def test_an_update_that_cannot_be_used_is_dropped_before_it_is_clipped() -> None:
    rows = updates(5, 4)
    rows[2] *= 1e160
    for algorithm in (fx.fedavg(), replace(fx.fedavg(), bound=2.0)):
        with pytest.warns(NonFiniteUpdateWarning):
            record = next(fx.simulate(vectors_task(rows), algorithm, rounds=1))
        assert (record.clients, record.dropped) == (4, 1)


def test_equal_clients_are_not_clipped_by_a_bound_of_one() -> None:
    for length in (1.0, 7.0, 60.0, 61.0):
        rows = torch.eye(4, dtype=torch.float64) * length
        record = next(fx.simulate(vectors_task(rows), fx.fedexp(bound=1.0), rounds=1))
        assert record.metrics["clipped"] == 0


def test_below_the_limits_the_sums_are_those_without_a_bound() -> None:
    deltas, weights = updates(), RNG.uniform(1, 2, 7).tolist()
    clipped = clipped_sums(deltas, weights, {}, Limits(100.0, {UPDATE: 1.0, WEIGHT: 1.5}))
    plain = Aggregate.of(deltas, weights)
    assert torch.equal(clipped.update, plain.update)
    assert clipped.sq_norm == plain.sq_norm
    assert clipped.extras[CLIPPED] == 0


def test_counts_of_norms_are_sums_without_weights_and_leave_out_what_is_not_finite() -> None:
    deltas = updates()
    deltas[3, 1] = torch.inf
    weights = [1.0, 1.0, 5.0, 1.0, 2.0, 1.0, 9.0]
    whole = clipped_sums(deltas, weights, {}, LIMITS)
    parts = [
        clipped_sums(deltas[k : k + 2], weights[k : k + 2], {}, LIMITS) for k in range(0, 7, 2)
    ]
    for total in (
        parts[0] + parts[1] + parts[2] + parts[3],
        parts[3] + parts[1] + parts[0] + parts[2],
    ):
        for name in (COUNTS + UPDATE, COUNTS + WEIGHT, CLIPPED):
            assert torch.equal(total.extras[name], whole.extras[name]), name
    assert whole.extras[COUNTS + UPDATE].sum() == whole.count == 6


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_median_and_longest_norm_are_known_within_a_bin(count: int) -> None:
    lengths = torch.from_numpy(10.0 ** RNG.uniform(-6, 6, count))
    counts = histogram(lengths)
    for value, expected in ((median(counts), lengths.median()), (longest(counts), lengths.max())):
        assert 1 <= (value / expected).item() <= WITHIN * (1 + 1e-12)


def test_norms_beyond_the_bins_are_in_the_outer_ones() -> None:
    counts = histogram(torch.tensor([0.0, 1e-30, 1e30], dtype=torch.float64))
    assert counts[[0, -1]].tolist() == [2, 1]
    nothing = histogram(torch.zeros(0))
    assert median(nothing) == longest(nothing) == 0


# In a run -----------------------------------------------------------------------------------------


def by_hand(rows: Tensor, algorithm: fx.Algorithm, rounds: int) -> list[Tensor]:
    """Return the iterates where clients' updates are these rows in every round, in plain torch."""
    assert algorithm.bound is not None
    lengths = rows.norm(dim=1)
    end = 2 ** ((torch.floor(torch.log2(lengths.median()) * 16) + 1) / 16)
    limit = algorithm.bound * end
    rows = torch.where(lengths > limit, limit / lengths * BELOW, 1.0)[:, None] * rows
    params, iterates = torch.zeros_like(rows[0]), []
    for _ in range(rounds):
        mean = rows.mean(dim=0)
        step = max(1.0, (rows.square().sum(1).mean() / (2 * mean.square().sum())).item())
        params = params - step * mean
        iterates.append(params)
    return iterates


def test_fedexp_is_clipped_from_the_first_round_on_as_computed_by_hand() -> None:
    rows = updates(9, 6)
    rows[4] *= 1e6
    algorithm = fx.fedexp(eps=0.0, bound=1.5)
    records = list(fx.simulate(vectors_task(rows), algorithm, rounds=3))
    for record, expected in zip(records, by_hand(rows, algorithm, 3), strict=True):
        torch.testing.assert_close(record.state.params, expected, rtol=1e-12, atol=1e-12)
        assert record.metrics["clipped"] >= 1
        ratio = record.metrics["longest_norm"] / rows.norm(dim=1).max().item()
        assert 1 <= ratio <= WITHIN


@pytest.mark.parametrize("make", [fx.fedavg, fx.fedexp, fx.scaffold, fx.fednova, fx.fedadam])
@pytest.mark.parametrize("model", ["plain", "batch norm"])
def test_engines_clip_alike(make: Any, model: str) -> None:
    task = unequal() if model == "plain" else unequal(double_batch_norm, (6, 40, 20, 8, 30))
    algorithm = replace(make(), bound=1.0)
    ends = []
    for engine in ("loop", "threads", "batched"):
        *_, last = fx.simulate(task, algorithm, rounds=3, cohort=4, engine=engine, weighting="size")
        ends.append(last)
    assert ends[0].metrics["clipped"] >= 1
    for other in ends[1:]:
        torch.testing.assert_close(other.state.params, ends[0].state.params, rtol=1e-9, atol=1e-11)
        assert other.metrics["clipped"] == ends[0].metrics["clipped"]


def test_a_bound_that_clips_nobody_changes_no_bit() -> None:
    task = unequal()
    plain, bounded = (
        [record.state.params for record in fx.simulate(task, algorithm, rounds=3, engine="loop")]
        for algorithm in (fx.scaffold_exp(), replace(fx.scaffold_exp(), bound=1e6))
    )
    assert all(map(torch.equal, plain, bounded))


def test_medians_are_part_of_the_state_so_runs_resume_bit_for_bit(tmp_path: Path) -> None:
    options: Any = {"options": {"bound": 1.0}, "rounds": 6, "engine": "loop"}
    whole = list(fx.simulate("toy", "scaffold-exp", **options))
    continued = fx.simulate("toy", "scaffold-exp", start=whole[2].state, **options)
    assert [r.to_json() | {"seconds": 0} for r in continued] == [
        r.to_json() | {"seconds": 0} for r in whole[3:]
    ]
    stored = fx.run("toy", "scaffold-exp", runs=tmp_path, **options)
    assert [row["train_loss"] for row in stored.rows] == [record.train_loss for record in whole]


class Parts(ProcessGroup):
    """Sums the clients of a round one by one, in reverse."""

    def engine(self, engine: Any) -> Any:
        def run(work: Any, state: Any) -> Any:
            sums = [engine(replace(work, cohort=work.cohort[k : k + 1]), state)
                    for k in reversed(range(len(work.cohort)))]  # fmt: skip
            total = sums[0][0]
            for aggregate, _ in sums[1:]:
                total = total + aggregate
            return total, {c: s for _, states in sums for c, s in states.items()}

        return run


def test_the_order_of_clients_and_the_parts_of_a_cohort_do_not_matter() -> None:
    task, algorithm = unequal(), fx.fedexp(bound=1.0)
    *_, one = fx.simulate(task, algorithm, rounds=3, engine="loop")
    *_, other = fx.simulate(task, algorithm, rounds=3, engine="loop", process_group=Parts())
    torch.testing.assert_close(other.state.params, one.state.params, rtol=1e-12, atol=1e-14)
    assert other.metrics["median_norm"] == one.metrics["median_norm"]


def test_one_client_of_ten_cannot_steer_fedexp() -> None:
    """Nine updates agree up to noise; the tenth is a million times longer, and opposed."""
    common = torch.from_numpy(RNG.normal(size=20))
    rows = common + 0.3 * updates(10, 20)
    honest = rows[1:].mean(dim=0)
    rows[0] *= -1e6

    def first(bound: float | None) -> Tensor:
        return next(fx.simulate(vectors_task(rows), fx.fedexp(bound=bound), rounds=1)).state.params

    def distance(params: Tensor) -> float:
        return ((params + honest).norm() / honest.norm()).item()

    assert distance(first(None)) > 1e5
    assert distance(first(2.0)) < 0.5


def test_an_attacker_who_is_alone_in_a_round_does_not_set_the_clip_of_the_next() -> None:
    rows = updates(5, 6)
    rows[0] *= 1e6

    def cohort(rng: np.random.Generator, round: int, train: Any) -> list[int]:
        return [0] if round == 2 else [1, 2, 3, 4]

    algorithm = fx.fedexp(bound=2.0)
    records = list(fx.simulate(vectors_task(rows), algorithm, rounds=3, cohort=cohort))
    medians = [record.state.server[MEDIAN + UPDATE].item() for record in records]
    assert medians[1] == 2 * medians[0]
    assert medians[2] == medians[0]


def test_bound_is_an_option_of_every_algorithm() -> None:
    e = fx.Experiment("digits", "fedadam", options={"bound": "2"}, rounds=1)
    assert e.setup.algorithm.bound == e.spec["options"]["bound"] == 2.0
    assert e.id != e.replace(options={}).id == fx.Experiment("digits", "fedadam", rounds=1).id
    assert "bound" not in e.replace(options={}).spec["options"]
    assert fx.Experiment.of(e.spec).id == e.id


@pytest.mark.parametrize("value", [0.5, 0, -1, float("nan"), float("inf"), "2", True])
def test_what_is_not_a_number_of_medians_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        fx.fedexp(bound=value)


# A median that follows bits -----------------------------------------------------------------------


def test_a_median_that_follows_bits_is_never_zero_which_means_unknown() -> None:
    median = 1e-19
    for _ in range(20):
        (after,) = follow(median, torch.tensor(-1.0, dtype=torch.float64)).values()
        median = after.item()
    assert median == 2.0**-64


QUIET = CentralPrivacy(clip=8.0, delta=1e-5, noise_multiplier=1e-8, norm_weight=1.0)


@pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # epsilon of hardly any noise
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_private_clip_is_the_bound_times_a_median_that_follows_bits(engine: Any) -> None:
    """Adaptive clipping by hand: the share of longer updates less a half, times 0.2, in the log."""
    rows = updates(9, 6)
    rows[4] *= 1e6
    lengths, params, median = rows.norm(dim=1), torch.zeros(6, dtype=torch.float64), 8.0 / 2.5
    options: dict[str, Any] = {"rounds": 30, "privacy": QUIET, "engine": engine}
    for record in fx.simulate(vectors_task(rows), fx.fedexp(eps=0.0, bound=2.5), **options):
        limit = min(8.0, 2.5 * median)
        assert record.metrics["clip"] == pytest.approx(limit, rel=1e-4)
        clipped = torch.where(lengths > limit, limit / lengths, 1.0)[:, None] * rows
        mean = clipped.mean(dim=0)
        step = (clipped.square().sum(1).mean() / (2 * mean @ mean)).clamp(min=1.0)
        params = params - step * mean
        torch.testing.assert_close(record.state.params, params, rtol=1e-4, atol=1e-4)
        share = (lengths > limit / 2.5).double().mean().item()
        median = limit / 2.5 * np.exp(0.2 * (share - 0.5))
    assert median == pytest.approx(lengths.median().item(), rel=0.15)


@pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
def test_a_private_clip_resumes_and_costs_no_epsilon() -> None:
    privacy = replace(QUIET, noise_multiplier=1.0)
    task, algorithm = vectors_task(updates(50, 6)), fx.fedexp(bound=2.5)
    whole = list(fx.simulate(task, algorithm, rounds=4, privacy=privacy))
    start = whole[1].state
    resumed = list(fx.simulate(task, algorithm, rounds=4, privacy=privacy, start=start))
    plain = list(fx.simulate(task, fx.fedexp(), rounds=4, privacy=privacy))
    for one, other in zip(whole[2:], resumed, strict=True):
        assert torch.equal(one.state.params, other.state.params)
        assert one.metrics["clip"] == other.metrics["clip"] != plain[-1].metrics["clip"] == 8.0
    assert whole[-1].metrics["epsilon"] == plain[-1].metrics["epsilon"]


@pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
def test_a_server_that_sees_no_lengths_reports_no_median() -> None:
    record = next(fx.simulate(vectors_task(updates()), fx.fedexp(bound=2.0), 1, privacy=QUIET))
    assert not {"median_norm", "longest_norm", "clipped"} & record.metrics.keys()


def test_local_noise_hides_the_lengths_that_a_bound_needs() -> None:
    privacy = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
    with pytest.raises(UsageError, match="leave bound out"):
        fx.simulate("digits", fx.fedexp(bound=2.0), privacy=privacy)
