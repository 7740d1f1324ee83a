"""Renamed public names still work, and name their replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fedexp as fx
from fedexp import client, distributed, runs
from fedexp.client import Tensors
from fedexp.runs.digest import digest_of
from fedexp.runs.spec import Spec


def test_a_rule_with_the_old_method_names_trains_as_before() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old\.drift is deprecated: use Old\.linear_corr"):

        @dataclass(frozen=True)
        class Old(fx.ClientRule):
            mu: float = 0.1

            def drift(self, shared: Tensors, local: Tensors) -> client.LinearCorrection:
                return client.LinearCorrection(self.mu)

    task = fx.tasks.toy()
    old, new = (
        [record.train_loss for record in fx.simulate(task, fx.Algorithm("prox", rule), 3)]
        for rule in (Old(), fx.Prox(0.1))
    )
    plain = [r.train_loss for r in fx.simulate(task, fx.fedavg(), 3)]
    assert old == new != plain


def test_a_rule_that_extends_scaffold_by_the_old_names_trains_as_before() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old\.(drift|finish) is deprecated: use Old"):

        @dataclass(frozen=True)
        class Old(fx.Scaffold):
            def drift(self, shared: Tensors, local: Tensors) -> client.LinearCorrection:
                pull, push = super().drift(shared, local)  # type: ignore[misc]
                correction: client.LinearCorrection = client.Drift(pull=pull, push=push)
                return correction

            def finish(
                self, delta: Tensor, travel: Tensor | float, shared: Tensors, local: Tensors
            ) -> tuple[Tensors, Tensors]:
                result: tuple[Tensors, Tensors] = super().finish(  # type: ignore[misc]
                    delta, travel, shared, local
                )
                return result

    task = fx.tasks.synthetic(clients=4, rows=3, dim=8)
    with pytest.warns(DeprecationWarning, match=r"(Drift|Old\.\w+) is deprecated"):
        old = [r.train_loss for r in fx.simulate(task, fx.Algorithm("old", Old()), 3, cohort=2)]
    new = [r.train_loss for r in fx.simulate(task, fx.Algorithm("new", fx.Scaffold()), 3, cohort=2)]
    assert old == new


def test_the_digest_of_a_rule_with_old_names_is_that_of_its_own_methods() -> None:
    def rule(base: Any) -> Any:
        class Old(base):  # type: ignore[misc]
            def drift(self, shared: Tensors, local: Tensors) -> None: ...

        return Old

    with pytest.warns(DeprecationWarning, match=r"Old\.drift is deprecated"):
        old = rule(fx.ClientRule)
    assert digest_of(old) == digest_of(rule(object))


def test_renamed_methods_of_rules_warn_when_called() -> None:
    with pytest.warns(DeprecationWarning, match=r"Prox\.drift is .* use Prox\.linear_correction"):
        correction = fx.Prox(0.1).drift({}, {})  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"use LinearCorrection\.prox"):
        assert correction.pull == 0.1
    with pytest.warns(DeprecationWarning, match=r"use LinearCorrection\.offset"):
        assert correction.push is None
    with pytest.warns(DeprecationWarning, match=r"use SGD\.update_broadcast"):
        assert fx.SGD().update_shared({}, None, 1.0) == {}  # type: ignore[attr-defined]


def test_renamed_arguments_of_simulate_warn() -> None:
    old: Any = {"keep_clients": "memory"}
    with pytest.warns(DeprecationWarning, match=r"simulate\(keep_clients=...\) .* client_store"):
        records = fx.simulate(fx.tasks.toy(), fx.scaffold(), 1, **old)
    record = next(iter(records))
    assert record.round == 1
    with pytest.warns(DeprecationWarning, match=r"use SimulationState\.broadcast"):
        assert record.state.shared is record.state.broadcast


def test_renamed_classes_warn_and_are_the_new_ones() -> None:
    with pytest.warns(DeprecationWarning, match=r"use fedexp\.client\.LinearCorrection"):
        old = client.Drift(0.5, torch.ones(1))
    assert isinstance(old, client.LinearCorrection)
    assert isinstance(old.offset, Tensor)
    with pytest.warns(DeprecationWarning, match=r"use fedexp\.distributed\.DistributedGroup"):
        assert distributed.Shared is distributed.DistributedGroup


class OneRank(distributed.Ranks):
    """A rank whose collectives return what it passes."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


def test_renamed_collectives_warn() -> None:
    rank = OneRank(0, 1, 0, torch.device("cpu"), store=None, gloo_group=None)
    one = torch.ones(1)
    with pytest.warns(DeprecationWarning, match=r"use Ranks\.world_size"):
        assert rank.world == 1
    with pytest.warns(DeprecationWarning, match=r"use Ranks\.all_reduce"):
        assert rank.sum(one) is one
    with pytest.warns(DeprecationWarning, match=r"use Ranks\.all_gather$"):
        assert rank.rows(one) == [one]
    with pytest.warns(DeprecationWarning, match=r"use Ranks\.all_gather_object"):
        assert rank.gather(3) == [3]
    with pytest.warns(DeprecationWarning, match=r"use Ranks\.compute_on_first"):
        assert rank.first(lambda: 3) == 3


def test_renamed_functions_and_arguments_of_flower_warn() -> None:
    flower = pytest.importorskip("fedexp.flower")
    for old, new in {
        "identify": "report_client_id",
        "planned": "simulated_train",
        "planned_evaluate": "simulated_evaluate",
    }.items():
        with pytest.warns(DeprecationWarning, match=rf"flower\.{old} is .* fedexp\.flower\.{new}"):
            assert getattr(flower, old) is getattr(flower, new)
    for name, options in {"FedExP": {}, "RuleStrategy": {"algorithm": fx.fedavg()}}.items():
        with pytest.warns(
            DeprecationWarning, match=rf"{name}\(identify=...\) .* query_client_ids="
        ):
            made = getattr(flower, name)(identify=True, **options)
        assert made.settings.query_client_ids is True


def test_the_former_names_of_run_options_warn() -> None:
    with pytest.warns(DeprecationWarning, match=r"use fedexp\.runs\.RunOptions"):
        assert runs.Keeping is runs.RunOptions
    with pytest.warns(DeprecationWarning, match=r"use fedexp\.runs\.RunInterrupted"):
        assert runs.Stopped is runs.RunInterrupted
    spec = Spec("toy", "fedavg", rounds=1)
    with pytest.warns(DeprecationWarning, match=r"use execute\(loggers=...\)"):
        runs.execute(spec, None, lambda spec, row: None, consumers=[])
