"""`simulate(..., privacy=...)`: clip, noise, step size, accounting, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedexp as fx
from fedexp.engine.batched import Batched
from fedexp.engine.plan import Work
from fedexp.engine.select import select_engine
from fedexp.engine.simulation import run_round
from fedexp.privacy import (
    BudgetSpentError,
    CentralPrivacy,
    LocalPrivacy,
    Privacy,
    PrivacyWarning,
    clip,
    composed_epsilon,
    epsilon,
    noise_multiplier,
)
from fedexp.privacy.accounting import Release
from fedexp.privacy.simulated import SimulatedPrivacy
from fedexp.server import exp_step_size
from tests.helpers.problems import BatchNormNet, Net, classes_task, least_squares, vectors_task

pytestmark = pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
DOCS = Path(__file__).parents[2] / "docs" / "privacy.md"


def central(z: float = 1.0, **options: Any) -> CentralPrivacy:
    return CentralPrivacy(**{"clip": 1.0, "delta": 1e-5, "noise_multiplier": z, **options})


def local(z: float = 1.0, **options: Any) -> LocalPrivacy:
    return LocalPrivacy(**{"clip": 1.0, "delta": 1e-5, "noise_multiplier": z, **options})


def updates(clients: int, dim: int, diversity: float = 8.0, length: float = 0.5) -> Tensor:
    """Return updates [K, d] of one length with mean ||Δ_i||² / ||mean||² near `diversity`."""
    own = torch.randn(clients, dim, generator=torch.Generator().manual_seed(0)).double()
    own /= own.norm(dim=1, keepdim=True)
    common = torch.zeros(dim, dtype=torch.float64)
    common[0] = 1.0
    mixed = math.sqrt(1 / diversity) * common + math.sqrt(1 - 1 / diversity) * own
    return length * mixed / mixed.norm(dim=1, keepdim=True)


def records(
    task: Any, algorithm: fx.Algorithm | None = None, rounds: int = 3, **options: Any
) -> list[fx.Record]:
    """Run by the loop unless an engine is named: the vectors of these tests may be zero."""
    options = {"engine": "loop", **options}
    return list(fx.simulate(task, algorithm or fx.fedexp(eps=0.0), rounds, **options))


def steps(found: list[fx.Record]) -> Tensor:
    """Return the changes of the model, [T, d]; the model is 0 at the start."""
    iterates = torch.stack([record.state.params for record in found])
    return torch.diff(iterates, dim=0, prepend=torch.zeros_like(iterates[:1]))


# Mechanism ----------------------------------------------------------------------------------------


def test_no_privacy_is_the_default_and_changes_nothing() -> None:
    one, other = records(classes_task(Net)), records(classes_task(Net), privacy=None)
    for a, b in zip(one, other, strict=True):
        assert replace(a, seconds=0.0) == replace(b, seconds=0.0)
        assert torch.equal(a.state.params, b.state.params)
        assert not a.metrics.keys() & {"epsilon", "delta", "noise_share"}


def test_a_run_without_privacy_imports_nothing_of_it() -> None:
    program = """
import sys
import fedexp as fx
list(fx.simulate(fx.tasks.toy(), fx.fedexp(), 2))
assert not [name for name in sys.modules if name.startswith("fedexp.privacy")]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("privacy", [central(1e-6), local(1e-6)])
def test_with_hardly_any_noise_it_is_the_plain_run(privacy: Privacy) -> None:
    task = vectors_task(updates(20, 30))
    plain, private = records(task), records(task, privacy=privacy)
    for one, other in zip(plain, private, strict=True):
        assert one.server_lr is not None
        assert one.server_lr > 2
        assert other.server_lr == pytest.approx(one.server_lr, rel=2e-3)
        torch.testing.assert_close(other.state.params, one.state.params, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("privacy", [central(1e-6), local(1e-6)])
def test_every_update_is_clipped_before_it_is_summed(privacy: Privacy) -> None:
    loud = updates(10, 30)
    loud[0] *= 1e6
    (record,) = records(vectors_task(loud), fx.fedavg(), 1, privacy=privacy)
    expected = clip(loud, 1.0).mean(dim=0)
    torch.testing.assert_close(record.state.params, -expected, rtol=0, atol=1e-6)


def test_central_noise_is_added_once_to_the_sum_and_has_the_declared_size() -> None:
    """Seeded; 20,000 coordinates, bounds of four standard errors."""
    still, dim, clients, z = torch.zeros(25, 20_000).double(), 20_000, 25, 2.0
    found = records(vectors_task(still), fx.fedavg(), 2, privacy=central(z, clip=0.5))
    for moved in steps(found):
        total = moved * clients
        assert total.std().item() == pytest.approx(z * 0.5, rel=4 / math.sqrt(2 * dim))
        assert abs(total.mean().item()) < 4 * z * 0.5 / math.sqrt(dim)
    first, second = steps(found)
    assert abs(float(first @ second) / float(first.norm() * second.norm())) < 4 / math.sqrt(dim)
    # FedExP also releases the squared norms, at a factor of sqrt(1 + kappa²)
    (record,) = records(vectors_task(still), rounds=1, privacy=central(z, norm_weight=0.75))
    assert record.server_lr == 1.0
    total = record.state.params * clients
    assert total.std().item() == pytest.approx(z * 1.25, rel=4 / math.sqrt(2 * dim))


def test_local_noise_is_added_by_every_client() -> None:
    still, dim, clients, z = torch.zeros(25, 20_000).double(), 20_000, 25, 2.0
    found = records(vectors_task(still), fx.fedavg(), 2, privacy=local(z, clip=0.5))
    for moved in steps(found):
        deviation = z * 0.5 * math.sqrt(clients)
        assert (moved * clients).std().item() == pytest.approx(
            deviation, rel=4 / math.sqrt(2 * dim)
        )


def test_the_step_size_under_central_noise_is_the_corrected_one() -> None:
    """The mean over 100 rounds is the formula of docs/privacy.md, within four standard errors."""
    rows, clients, dim = updates(500, 800), 500, 800
    found = records(vectors_task(rows), rounds=100, privacy=central(), engine="batched")
    drawn = torch.tensor([record.server_lr or 0.0 for record in found]).double()
    kappa = 2.0 * math.sqrt(1.0 / clients)
    sigma = math.sqrt(1.0 + kappa**2)
    mean_sq_norm = float(rows.square().sum(dim=1).mean()) - 2 * sigma / kappa / clients
    length = float(rows.mean(dim=0).square().sum()) + dim * (sigma / clients) ** 2
    error = drawn.std().item() / math.sqrt(len(drawn))
    assert drawn.mean().item() == pytest.approx(exp_step_size(mean_sq_norm, length), abs=4 * error)
    exact = records(vectors_task(rows), rounds=1)[0].server_lr or 0.0
    assert 0.7 * exact < drawn.mean().item() < exact


def test_the_step_size_under_local_noise_is_the_corrected_one() -> None:
    rows, clients, dim, z = updates(500, 300, length=0.9), 500, 300, 0.15
    found = records(vectors_task(rows), rounds=40, privacy=local(z), engine="batched")
    drawn = torch.tensor([record.server_lr or 0.0 for record in found]).double()
    margin = 2 * z * math.sqrt((2 * dim * z**2 + 4) / clients)
    length = float(rows.mean(dim=0).square().sum()) + dim * z**2 / clients
    error = drawn.std().item() / math.sqrt(len(drawn))
    assert drawn.mean().item() == pytest.approx(exp_step_size(0.81 - margin, length), abs=4 * error)
    exact = records(vectors_task(rows), rounds=1)[0].server_lr or 0.0
    assert 0.7 * exact < drawn.mean().item() < exact


@pytest.mark.parametrize("privacy", [central(0.3), local(0.3)])
def test_noise_follows_from_the_seed_or_the_noise_seed(privacy: Any) -> None:
    task = vectors_task(torch.zeros(5, 8))

    def moved(seed: int, noise_seed: int | None = None) -> Tensor:
        given = replace(privacy, noise_seed=noise_seed)
        return records(task, fx.fedavg(), 2, seed=seed, privacy=given)[-1].state.params

    assert torch.equal(moved(1), moved(1))
    assert not torch.equal(moved(1), moved(2))
    assert torch.equal(moved(1, noise_seed=7), moved(2, noise_seed=7))


ENGINES = [
    (lambda: classes_task(Net), "batched"),
    (lambda: classes_task(Net), "threads"),
    (lambda: fx.tasks.digits(), "dense"),
    (lambda: least_squares(clients=7), "quadratic"),
]


@pytest.mark.parametrize("privacy", [central(0.2), local(0.2), central(0.2, sampling="poisson")])
@pytest.mark.parametrize(("make", "engine"), ENGINES, ids=[name for _, name in ENGINES])
def test_engines_agree_with_the_loop(make: Any, engine: Any, privacy: Privacy) -> None:
    task = make()
    loop, other = (
        records(task, cohort=3, engine=name, privacy=privacy, local=replace(task.local, lr=0.05))
        for name in ("loop", engine)
    )
    assert other[0].engine.startswith(engine)
    for one, two in zip(loop, other, strict=True):
        torch.testing.assert_close(two.state.params, one.state.params, rtol=1e-4, atol=1e-5)
        assert two.metrics["epsilon"] == one.metrics["epsilon"]
        assert two.clients == one.clients
        assert two.server_lr == pytest.approx(one.server_lr, rel=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("privacy", [central(0.2), local(0.2), central(0.2, sampling="poisson")])
def test_a_gpu_has_the_noise_of_the_cpu(privacy: Privacy) -> None:
    task = classes_task(Net)
    loop, other = (
        records(task, cohort=3, engine=engine, device=device, precision="float32", privacy=privacy)
        for engine, device in (("loop", "cpu"), ("batched", "cuda"))
    )
    for one, two in zip(loop, other, strict=True):
        ours, theirs = two.state.params.cpu(), one.state.params
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert two.metrics["epsilon"] == one.metrics["epsilon"]
    assert other[0].engine_choice is not None
    assert other[0].engine_choice.cuda_graph != "round"


def test_the_trial_of_an_engine_sees_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise would hide that an engine disagrees with the loop."""
    seen = []

    def spy(name: Any, work: Any, *rest: Any) -> Any:
        seen.append(work.privacy)
        return select_engine(name, work, *rest)

    monkeypatch.setattr("fedexp.engine.simulation.select_engine", spy)
    records(classes_task(Net), rounds=1, privacy=local(), engine="auto")
    assert seen == [None]


def test_a_round_of_the_batched_engine_is_not_captured_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def captured(*args: Any) -> Any:
        raise AssertionError("a captured round would sum updates without a clip")

    monkeypatch.setattr(Batched, "run_round", captured)
    records(classes_task(Net), rounds=1, privacy=central(), engine="batched")
    with pytest.raises(AssertionError):
        records(classes_task(Net), rounds=1, engine="batched")


# Cohorts ------------------------------------------------------------------------------------------


def test_known_cohorts_are_those_of_the_run_without_privacy() -> None:
    task = vectors_task(torch.eye(30).double())
    plain, private = (
        steps(records(task, fx.fedavg(), 4, cohort=6, seed=2, privacy=given))
        for given in (None, central(1e-9))
    )
    torch.testing.assert_close(private, plain, rtol=0, atol=1e-6)


def test_poisson_cohorts_vary_and_empty_ones_are_noised_and_charged() -> None:
    """N = 10, M = 1: about a third of the cohorts are empty."""
    task = vectors_task(torch.zeros(10, 2000))
    found = records(task, fx.fedavg(), 20, cohort=1, privacy=central(2.0, sampling="poisson"))
    assert len({record.clients for record in found}) > 1
    empty = [record.clients == 0 for record in found]
    assert any(empty)
    assert all(moved.std().item() == pytest.approx(2.0, rel=0.1) for moved in steps(found))
    spent = epsilon(2.0, 20, 1e-5, sampling="poisson", clients=10, cohort=1)
    assert found[-1].metrics["epsilon"] == spent


def test_fixed_cohorts_have_their_size_and_their_price() -> None:
    task = vectors_task(updates(40, 5))
    found = records(task, rounds=5, cohort=4, privacy=central(sampling="fixed"))
    assert {record.clients for record in found} == {4}
    price = composed_epsilon({Release(1.0, "fixed", 40, 4): 5}, 1e-5)
    assert found[-1].metrics["epsilon"] == price


def test_updates_that_are_not_finite() -> None:
    """Left out of a central sum, with the divisor as it was; zero and noised by a client itself."""
    rows = updates(10, 500)
    task = replace(vectors_task(rows, broken=(3,)), evaluate_every=10)

    def one_round(privacy: Privacy) -> fx.Record:
        return next(iter(fx.simulate(task, fx.fedavg(), 2, engine="loop", privacy=privacy)))

    with pytest.warns(fx.NonFiniteUpdateWarning):
        dropped = one_round(central(1e-9))
    assert (dropped.clients, dropped.dropped) == (9, 1)
    rest = rows[torch.arange(10) != 3].sum(dim=0) / 10
    torch.testing.assert_close(dropped.state.params, -rest, rtol=0, atol=1e-6)
    noised = one_round(local(1e-9))
    assert (noised.clients, noised.dropped) == (10, 0)
    torch.testing.assert_close(noised.state.params, -rest, rtol=0, atol=1e-6)


# Accounting ---------------------------------------------------------------------------------------


def test_records_have_the_cost_so_far_and_the_noise() -> None:
    found = records(vectors_task(updates(20, 30)), privacy=central(2.0, clip=0.5))
    assert [r.metrics["epsilon"] for r in found] == [epsilon(2.0, k, 1e-5) for k in (1, 2, 3)]
    for record in found:
        row = record.to_json()
        assert (row["delta"], row["noise_multiplier"], row["clip"]) == (1e-5, 2.0, 0.5)
        assert 0 < row["noise_share"] <= 1
    ours = records(vectors_task(updates(20, 30)), privacy=local(2.0))
    assert [r.metrics["epsilon"] for r in ours] == [epsilon(1.0, k, 1e-5) for k in (1, 2, 3)]


@pytest.mark.parametrize("privacy", [central(1.0), local(1.0), central(1.0, sampling="poisson")])
def test_a_run_that_continues_continues_the_count_and_the_noise(privacy: Any) -> None:
    task = vectors_task(updates(20, 30))
    whole = records(task, rounds=4, cohort=5, privacy=privacy)
    rest = records(task, rounds=4, cohort=5, privacy=privacy, start=whole[1].state)
    for one, other in zip(whole[2:], rest, strict=True):
        assert other.metrics == one.metrics
        assert torch.equal(other.state.params, one.state.params)


def continued(
    first: Privacy | None, then: Privacy, rounds: int = 4, **options: Any
) -> list[fx.Record]:
    """Return the records of a run whose settings change after two rounds."""
    task = vectors_task(updates(20, 30))
    before = records(task, rounds=2, privacy=first, **options)
    return records(task, rounds=rounds, privacy=then, start=before[-1].state, **options)


def test_a_state_charges_its_rounds_as_they_were_made() -> None:
    """Two rounds with noise 0.1 do not become cheaper because later ones have noise 5."""
    weak, strong = Release(0.1, "known", 20, 20), Release(5.0, "known", 20, 20)
    found = continued(central(0.1), central(5.0))
    costs = [composed_epsilon({weak: 2, strong: k}, 1e-5) for k in (1, 2)]
    assert [record.metrics["epsilon"] for record in found] == costs
    assert found[-1].state.releases == {weak: 2, strong: 2}
    assert costs[-1] > 20 * epsilon(5.0, 4, 1e-5)
    of_clients = continued(local(0.2), local(10.0))[-1].metrics["epsilon"]
    assert of_clients == pytest.approx(costs[-1])  # twice the noise for any two inputs of a client


def test_fixed_cohorts_and_local_noise_share_an_account_and_other_mixtures_are_refused() -> None:
    """Neighbours of both differ in one client replaced; of known and poisson, in one added."""
    last = continued(central(1.0, sampling="fixed"), local(4.0), cohort=5)[-1]
    mixed = {Release(1.0, "fixed", 20, 5): 2, Release(4.0, "fixed", 20, 20): 2}
    assert last.metrics["epsilon"] == composed_epsilon(mixed, 1e-5)
    for first in (central(), central(sampling="poisson")):
        with pytest.raises(fx.UsageError, match=r"cannot mix .* begin another run"):
            continued(first, local())


def test_rounds_without_privacy_make_epsilon_infinite() -> None:
    with pytest.warns(PrivacyWarning, match="start has rounds without privacy, so epsilon is inf"):
        found = continued(None, central(1.0))
    assert [record.metrics["epsilon"] for record in found] == [math.inf] * 2
    assert found[-1].to_json()["epsilon"] is None
    for promised in (CentralPrivacy(1.0, 1e-5, epsilon=8.0), local(rounds=9)):
        with pytest.raises(BudgetSpentError, match="rounds without privacy"):
            continued(None, promised)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_plain_round_after_private_ones_is_not_forgotten(engine: Any) -> None:
    task = classes_task(Net)
    state = records(task, rounds=1, privacy=central())[-1].state
    for rounds, privacy in ((2, None), (3, central())):
        (last,) = records(task, rounds=rounds, privacy=privacy, start=state, engine=engine)
        state = last.state
    assert state.releases is None
    assert last.metrics["epsilon"] == math.inf


def test_a_promised_epsilon_includes_what_the_state_has_spent() -> None:
    promised = CentralPrivacy(1.0, 1e-5, epsilon=8.0)
    with pytest.raises(BudgetSpentError, match=r"promised: (.*) is spent.* simulate 2 rounds"):
        continued(central(0.1), promised)
    assert 4.0 < continued(central(100.0), promised)[-1].metrics["epsilon"] < 8.0


def test_a_clients_budget_counts_rounds_with_other_noise_by_their_cost() -> None:
    """Half the noise costs four rounds: two of them are eight."""
    found = continued(local(0.5, rounds=9), local(1.0, rounds=10))
    assert len(found) == 2
    with pytest.raises(BudgetSpentError, match=r"in round 4 client 0 .* simulate 3 rounds at most"):
        continued(local(0.5, rounds=9), local(1.0, rounds=9))
    # rounds of the same settings are counted where a client took part: in a quarter of them here
    same = local(rounds=8)
    assert continued(same, same, rounds=8, cohort=5)[-1].round == 8


def test_a_warm_start_counts_the_releases_of_its_record() -> None:
    task = vectors_task(updates(20, 30))
    first = records(task, fx.fedavg(), rounds=2, privacy=central(2.0))[-1]
    again = records(task, rounds=2, privacy=central(2.0), start=first)
    assert [record.round for record in again] == [1, 2]
    assert [r.metrics["epsilon"] for r in again] == [epsilon(2.0, k, 1e-5) for k in (3, 4)]
    spent, plain = records(task, rounds=2, privacy=local(rounds=2))[-1], records(task, rounds=1)[-1]
    with pytest.raises(BudgetSpentError, match="in round 1 client 0"):
        records(task, rounds=2, start=spent, privacy=local(rounds=2))
    with pytest.warns(PrivacyWarning, match=r"infinite; begin another run, with start=record\.mod"):
        after = records(task, rounds=1, start=plain, privacy=central(2.0))
    assert after[-1].metrics["epsilon"] == math.inf


def test_weights_without_a_record_are_said_to_have_no_account() -> None:
    task = classes_task(Net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrivacyWarning)
        record = records(task, rounds=1, privacy=central(2.0))[-1]
        assert not [warning for warning in caught if "rounds of this run" in str(warning.message)]
        (after,) = records(task, rounds=1, privacy=central(2.0), start=record.model())
    (text,) = {str(w.message) for w in caught if "rounds of this run" in str(w.message)}
    assert "simulate with start=record" in text
    assert after.metrics["epsilon"] == epsilon(2.0, 1, 1e-5)


def test_a_stored_state_has_its_releases(tmp_path: Path) -> None:
    task, path = vectors_task(updates(20, 30)), tmp_path / "state.safetensors"
    whole = records(task, rounds=4, privacy=central(0.3))
    fx.save_state(whole[1].state, path)
    rest = records(task, rounds=4, privacy=central(0.3), start=fx.load_state(path))
    assert [record.metrics for record in rest] == [record.metrics for record in whole[2:]]
    save_file({n: v for n, v in load_file(path).items() if n != "model/releases"}, path)
    with pytest.warns(PrivacyWarning, match="epsilon is infinite"):  # stored by an earlier version
        records(task, rounds=4, privacy=central(0.3), start=fx.load_state(path))


@pytest.mark.parametrize(
    "rows",
    [
        '"none"',
        "[3]",
        '[{"noise_multiplier": 0, "sampling": "known", "clients": 2, "cohort": 1, "count": 1}]',
        '[{"noise_multiplier": 1, "sampling": "known", "clients": 2, "cohort": 1, "count": -1}]',
        '[{"noise_multiplier": [], "sampling": "known", "clients": 2, "cohort": 1, "count": 1}]',
        '[{"noise_multiplier": 1, "sampling": "known", "clients": 2, "cohort": 1}]',
    ],
)
def test_a_state_with_forged_releases_is_refused(rows: str, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    fx.save_state(records(vectors_task(updates(20, 5)), rounds=1, privacy=central())[0].state, path)
    forged = torch.tensor(list(rows.encode()), dtype=torch.uint8)
    save_file({**load_file(path), "model/releases": forged}, path)
    with pytest.raises(fx.UsageError, match="is not a state; write it with"):
        fx.load_state(path)


def noise_warnings(task: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records(task, fx.fedavg(), **options)
    return [str(w.message) for w in caught if "noise_share 1" in str(w.message)]


def test_a_run_whose_noise_drowns_the_updates_warns_once() -> None:
    rows = updates(20, 2000)
    (text,) = noise_warnings(vectors_task(rows), rounds=12, privacy=central(5.0, clip=100.0))
    assert "take more clients per round, a smaller clip or a larger epsilon" in text
    assert not noise_warnings(vectors_task(rows), rounds=4, privacy=central(0.01))
    # an empty cohort has nothing to drown
    still = vectors_task(torch.zeros(10, 2000))
    empty = central(2.0, sampling="poisson", cohort=1, clients=10**6)
    assert not noise_warnings(still, rounds=12, cohort=1, privacy=empty)


def test_epsilon_gives_the_noise_of_a_deployment() -> None:
    (*_, last) = records(
        vectors_task(updates(20, 30)), rounds=6, privacy=CentralPrivacy(1.0, 1e-5, epsilon=8.0)
    )
    assert last.metrics["epsilon"] == pytest.approx(8.0)
    assert last.metrics["noise_multiplier"] == noise_multiplier(8.0, 6, 1e-5)


def test_rounds_that_cost_more_than_was_promised_are_refused_at_the_call() -> None:
    """Noise for 1,000 clients, of whom 20 are simulated."""
    privacy = CentralPrivacy(1.0, 1e-5, epsilon=8.0, sampling="fixed", clients=1000)
    task = vectors_task(updates(20, 30))
    with pytest.raises(BudgetSpentError, match=r"simulate (\d+) rounds at most") as caught:
        fx.simulate(task, fx.fedavg(), 8, cohort=10, privacy=privacy)
    assert "\n" not in str(caught.value)


def test_a_clients_own_budget() -> None:
    task = vectors_task(updates(20, 5))
    assert len(records(task, rounds=4, privacy=local(rounds=4))) == 4
    with pytest.raises(BudgetSpentError, match="simulate 4 rounds at most"):
        fx.simulate(task, fx.fedavg(), 5, privacy=local(rounds=4))
    # in cohorts of 5 of 20 a client takes part in a quarter of the rounds
    assert len(records(task, rounds=8, cohort=5, privacy=local(rounds=8))) == 8
    with pytest.raises(BudgetSpentError, match="allows; simulate") as caught:
        fx.simulate(task, fx.fedavg(), 60, cohort=5, privacy=local(rounds=8))
    most = int(str(caught.value).split("simulate ")[1].split()[0])
    assert most > 8
    fx.simulate(task, fx.fedavg(), most, cohort=5, privacy=local(rounds=8))


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weighting": "size"}, "uniform weights, not size; leave weighting out"),
        ({"algorithm": fx.scaffold()}, "control variates of scaffold are not covered"),
        ({"task": classes_task(BatchNormNet)}, "use a model with GroupNorm or none"),
        (
            {"privacy": 8.0},
            "privacy is float; give fedexp.privacy.CentralPrivacy",
        ),
    ],
)
@pytest.mark.parametrize("privacy", [central(), local()])
def test_what_privacy_does_not_cover_is_refused(
    options: dict[str, Any], message: str, privacy: Privacy
) -> None:
    given = {"task": classes_task(Net), "algorithm": fx.fedexp(), "privacy": privacy, **options}
    with pytest.raises(fx.UsageError, match=message):
        fx.simulate(rounds=2, **given)


def test_a_cohort_beyond_the_divisor_is_refused() -> None:
    task = vectors_task(updates(20, 5))
    with pytest.raises(fx.UsageError, match=r"CentralPrivacy\(cohort=20\), not 5; or simulate"):
        fx.simulate(task, fx.fedexp(), 2, privacy=central(cohort=5))
    (first, *_) = records(task, fx.fedavg(), cohort=5, privacy=central(1e-9, cohort=10))
    assert first.clients == 5  # divided by 10, whoever takes part
    assert first.state.params.norm() < 0.5 * 0.5


def test_without_the_accounting_library_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for privacy in (central(), local()):
        with pytest.raises(fx.UsageError, match=r"fedexp\[privacy\]"):
            fx.simulate(vectors_task(updates(20, 5)), fx.fedexp(), 2, privacy=privacy)


def test_run_round_alone_applies_privacy_of_its_work() -> None:
    """`run_round` is public: the same round by hand."""
    task, algorithm = vectors_task(updates(20, 30)), fx.fedexp(eps=0.0)
    mechanism = central().prepare(clients=20, cohort=20, rounds=3, algorithm=algorithm)
    privacy = SimulatedPrivacy.of(central(), mechanism, clients=20, cohort=20, seed=0)
    work = Work(task, algorithm, task.local, "uniform", 0, 1, np.arange(20), privacy=privacy)
    record = run_round(work, fx.SimulationState.initial(task, algorithm, 0))
    first = records(task, algorithm, privacy=central())[0]
    assert torch.equal(record.state.params, first.state.params)
    assert record.metrics == first.metrics


# Documentation ------------------------------------------------------------------------------------


def test_the_snippet_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    section = DOCS.read_text().split("## Choose epsilon before deployment")[1].split("\n## ")[0]
    exec(section.split("```python\n")[1].split("```")[0], {})
    expected = section.split("```text\n")[1].split("```")[0].strip().split("\n")
    printed = capsys.readouterr().out.strip().split("\n")
    for ours, theirs in zip(printed, expected, strict=True):
        *cost, accuracy = ours.rsplit(maxsplit=1)
        *stated, reached = theirs.rsplit(maxsplit=1)
        assert cost == stated
        assert float(accuracy) == pytest.approx(float(reached), abs=0.02)  # of other kernels
