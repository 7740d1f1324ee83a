"""`simulate`: records, seeds, participation, averaging, buffers, and failures."""

from __future__ import annotations

import json
import math
import warnings
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.data.federation import Batch
from fedexp.engine.plan import sample_cohort
from fedexp.objective import Buffers, LeastSquares
from fedexp.tasks.metrics import as_metrics
from tests.helpers.problems import BatchNormNet, classes_task, dropout_net, least_squares
from tests.helpers.rules import ALGORITHMS, rule_id


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_every_algorithm_yields_one_record_per_round(algorithm: fx.Algorithm) -> None:
    records = list(fx.simulate(least_squares(), algorithm, rounds=5, cohort=2))
    assert [r.round for r in records] == [1, 2, 3, 4, 5]
    assert all(r.server_lr is not None and r.clients == 2 for r in records)
    json.dumps([r.to_json() for r in records], allow_nan=False)


@pytest.mark.parametrize("build", [BatchNormNet, dropout_net])
def test_the_same_seed_gives_the_same_bits(build: object) -> None:
    task = classes_task(build)
    one, two = (list(fx.simulate(task, fx.fedexp(), 4, cohort=2, seed=3)) for _ in range(2))
    other = list(fx.simulate(task, fx.fedexp(), 4, cohort=2, seed=4))
    assert torch.equal(one[-1].state.params, two[-1].state.params)
    assert not torch.equal(one[-1].state.params, other[-1].state.params)


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(fx.simulate(classes_task(dropout_net), fx.fedavg(), 2))
    assert torch.equal(torch.rand(3), expected)


def test_participation_is_a_pure_function_of_seed_and_round() -> None:
    first = [sample_cohort(7, t, 100, 20).tolist() for t in range(1, 30)]
    again = [sample_cohort(7, t, 100, 20).tolist() for t in reversed(range(1, 30))]
    assert first == again[::-1]
    assert all(len(set(c)) == 20 and c == sorted(c) for c in first)
    seen = np.bincount(np.concatenate([sample_cohort(7, t, 100, 20) for t in range(500)]))
    assert seen.min() > 60  # 100 expected each, standard deviation 9
    assert seen.max() < 140


def test_weights_enter_the_mean_and_the_norm_alike() -> None:
    """The same weights in both sums (docs/paper.md#weighted-clients)."""
    task = classes_task(lambda: nn.Linear(4, 3))
    local = fx.LocalTraining(lr=0.1, steps=3, batch_size=None)
    rule = fx.fedexp(eps=0.0, factor=0.5)  # large steps, though these clients agree
    record = next(fx.simulate(task, rule, 1, local=local, weighting="size"))
    start, _ = task.objective.initial(0)
    deltas = []
    for i in range(task.train.clients):
        w = start
        for _ in range(3):
            w = w - 0.1 * task.objective.gradient(w, Buffers.none(), task.train.client(i))[0]
        deltas.append((start - w).double().numpy())
    p = task.train.sizes / task.train.sizes.sum()
    mean = sum(pi * d for pi, d in zip(p, deltas, strict=True))
    eta = max(1.0, sum(p * [(d**2).sum() for d in deltas]) / (0.5 * (mean**2).sum()))
    assert eta > 1.5
    assert record.server_lr == pytest.approx(eta, rel=1e-5)
    np.testing.assert_allclose(
        record.state.params.numpy(), start.numpy() - eta * mean, rtol=1e-4, atol=1e-6
    )


def test_output_is_the_mean_of_the_last_two_and_never_fed_back() -> None:
    task = least_squares()
    averaged = list(fx.simulate(task, fx.fedexp(), 5))
    plain = list(fx.simulate(task, replace(fx.fedexp(), average_last=1), 5))
    for a, b in zip(averaged, plain, strict=True):
        assert torch.equal(a.state.params, b.state.params)  # training is the same
    mean = (plain[3].state.params + plain[4].state.params) / 2
    assert torch.equal(averaged[4].state.output()[0], mean)
    assert averaged[4].train_loss == task.evaluate(mean, Buffers.none())["train_loss"]
    assert averaged[4].train_loss != plain[4].train_loss


def test_the_first_output_is_the_first_iterate_alone() -> None:
    record = next(fx.simulate(least_squares(), fx.fedexp(), 1))
    assert torch.equal(record.state.output()[0], record.state.params)


def test_average_last_k() -> None:
    task = least_squares()
    iterates = [r.state.params for r in fx.simulate(task, fx.fedavg(), 5)]
    *_, last = fx.simulate(task, replace(fx.fedavg(), average_last=3), 5)
    torch.testing.assert_close(last.state.output()[0], torch.stack(iterates[2:]).mean(0))


def test_buffers_are_averaged_never_extrapolated() -> None:
    """Clients with very different variances: extrapolation would push some below zero."""
    task = classes_task(BatchNormNet)
    algorithm = replace(fx.Algorithm(server=fx.Average(50.0)), average_last=1)
    local = fx.LocalTraining(lr=1e-3, steps=3, batch_size=None)
    record = next(fx.simulate(task, algorithm, 1, local=local))
    params, start = task.objective.initial(0)
    ends = []
    for i in range(task.train.clients):
        w, buffers = params, start
        for _ in range(3):
            grad, buffers = task.objective.gradient(w, buffers, task.train.client(i))
            w = w - 1e-3 * grad
        ends.append(buffers.averaged)
    after = record.state.buffers
    torch.testing.assert_close(after.averaged, torch.stack(ends).mean(0))
    assert torch.equal(after.kept, start.kept)  # the counter of batches stays


def test_variances_stay_positive_under_heavy_extrapolation() -> None:
    task = classes_task(BatchNormNet)
    heavy = fx.fedexp(eps=0.0, factor=0.1)  # steps of ten and more
    local = fx.LocalTraining(lr=1e-3, steps=5, batch_size=4)
    for record in fx.simulate(task, heavy, 10, cohort=2, local=local):
        assert (record.server_lr or 0) > 9
        model = task.objective.load(*record.state.output())  # type: ignore[attr-defined]
        assert (model.norm.running_var > 0).all()


def test_resuming_gives_the_same_bits() -> None:
    task, algorithm = classes_task(BatchNormNet), fx.scaffold_exp()
    whole = list(fx.simulate(task, algorithm, 6, cohort=2))
    rest = list(fx.simulate(task, algorithm, 6, cohort=2, start=whole[2].state))
    assert [r.round for r in rest] == [4, 5, 6]
    assert torch.equal(whole[-1].state.params, rest[-1].state.params)
    assert whole[-1].train_loss == rest[-1].train_loss


def test_a_start_that_does_not_fit_is_refused() -> None:
    task = least_squares()
    *_, record = fx.simulate(task, fx.fedexp(), 2)
    with pytest.raises(fx.UsageError, match="another task or algorithm"):
        fx.simulate(task, fx.fedadam(), 4, start=record.state)
    with pytest.raises(fx.UsageError, match="another task or algorithm"):  # eps has another unit
        fx.simulate(task, fx.fedexp(eps=0.1), 4, start=record.state)
    with pytest.raises(fx.UsageError, match="has done 2 rounds already"):
        fx.simulate(task, fx.fedexp(), 2, start=record.state)


def test_a_step_of_another_shape_is_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Own(fx.ServerRule):
        whole: bool

        def step(self, params: torch.Tensor, aggregate: fx.Aggregate, state: Any) -> Any:
            after = params - aggregate.mean
            metrics = {"server_lr": torch.ones(3 if self.whole else 1)}
            return (after if self.whole else after[:2]), state, metrics

    def run(whole: bool) -> None:
        fx.simulate(least_squares(), fx.Algorithm("own", server=Own(whole)), 1)

    with pytest.raises(
        fx.UsageError, match=r"Own returns \[2\] of torch.float64 as parameters, not \[20\]"
    ):
        run(whole=False)
    with pytest.raises(
        fx.UsageError, match=r"step of Own reports server_lr as \[3\] of torch.float32; report one"
    ):
        run(whole=True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda p: (p, {"m": p}, {}), "returns a state whose m differs from that of init"),
        (lambda p: (p, {"m": 1.0}, {}), "returns dict as state; return tensors by name"),
        (lambda p: (p, None, {}), "returns NoneType as state; return tensors by name"),
        (lambda p: (p, {}, None), "returns NoneType as metrics; return numbers by name"),
        (lambda p: (p, {}, {"text": "high"}), "reports text as str; report one number"),
        (
            lambda p: (p.float(), {}, {}),
            r"returns \[20\] of torch.float32 as parameters, not \[20\] of torch.float64",
        ),
    ],
)
def test_what_a_step_returns_is_checked(returned: Any, message: str) -> None:
    @dataclass(frozen=True)
    class Own(fx.ServerRule):
        def step(self, params: torch.Tensor, aggregate: fx.Aggregate, state: Any) -> Any:
            return returned(params - aggregate.mean)

    with pytest.raises(fx.UsageError, match=f"step of Own {message}"):
        fx.simulate(least_squares(), fx.Algorithm("own", server=Own()), 1)


@pytest.mark.parametrize(
    ("correct", "ended", "message"),
    [
        (None, ({}, {}), "correct of Own returns NoneType; return the corrected gradient"),
        (
            torch.zeros(2),
            ({}, {}),
            r"correct of Own returns \[2\] of .*; return the corrected gradient",
        ),
        ("grad", {}, "end_round of Own returns dict; return two dicts of tensors"),
        ("grad", ({}, {"n": torch.ones(())}), "end_round of Own sums 'n', which is not a vector"),
    ],
)
def test_what_a_client_rule_returns_is_checked(correct: Any, ended: Any, message: str) -> None:
    class Own(fx.ClientRule):
        def correct(self, grad: Any, *rest: Any) -> Any:
            return grad if isinstance(correct, str) else correct

        def end_round(self, *given: Any) -> Any:
            return ended

    with pytest.raises(fx.UsageError, match=message):
        fx.simulate(least_squares(), fx.Algorithm("own", client=Own()), 1)


@pytest.mark.parametrize("engine", ["loop", "threads", "batched", "auto"])
def test_errors_of_torch_about_the_data_name_them(engine: Any) -> None:
    local = fx.LocalTraining(lr=0.1, epochs=1, batch_size=4)
    normed = classes_task(BatchNormNet, (8, 9, 4, 6))
    with pytest.raises(
        fx.UsageError, match=r"^client 1 has a batch of one example, which BatchNor"
    ):
        list(fx.simulate(normed, fx.fedavg(), 1, local=local, engine=engine))
    tokens = np.arange(40).reshape(20, 2) % 12
    train = fx.Federation.from_ids({"x": tokens, "y": np.arange(20) % 3}, np.arange(20) // 5)
    layers = lambda: nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(8, 3))  # noqa: E731
    task = fx.supervised("words", layers, train, local=local)
    ranges = r"x 0 to 11 \(training\), y 0 to 2 \(training\); raise num_embeddings, or clean"
    with pytest.raises(fx.UsageError, match=f"^an embedding of the model has no entry .* {ranges}"):
        list(fx.simulate(task, fx.fedavg(), 1, engine=engine))


def test_an_initial_model_that_is_not_finite_is_refused() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.constant_(self.weight, math.nan)

    with pytest.raises(fx.UsageError, match="the initial model holds values that are not finite"):
        fx.simulate(classes_task(lambda: Broken(4, 3)), fx.fedavg(), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_schedule": lambda a, b: 1.0}, "lr_schedule does not take its arguments .*lambda r"),
        ({"step_schedule": lambda s: 1.0}, "step_schedule does not take its arguments .*step, st"),
        ({"optimizer": lambda params: None}, "optimizer does not take its arguments .*RMSprop"),
    ],
)
def test_functions_of_local_training_take_their_arguments(options: Any, message: str) -> None:
    task = classes_task()
    with pytest.raises(fx.UsageError, match=message):
        list(fx.simulate(task, fx.fedavg(), 1, local=replace(task.local, **options)))


@pytest.mark.parametrize("count", [1.5, "2", 0])
def test_average_last_is_a_whole_number(count: Any) -> None:
    with pytest.raises(fx.UsageError, match="average_last must be"):
        fx.Algorithm("own", average_last=count)


def test_a_name_takes_the_weighting_of_the_recipe() -> None:
    sizes = np.repeat([0, 1, 2], [2, 5, 9])
    data = {"x": np.arange(32, dtype=np.float32).reshape(16, 2) / 32, "y": sizes % 2}
    train = fx.Federation.from_ids(data, sizes)
    tuned = {"fedavg": {"weighting": "size"}}
    task = fx.supervised("mine", lambda: nn.Linear(2, 2), train, tuned=tuned)

    def last(algorithm: Any, **more: Any) -> float | None:
        *_, record = fx.simulate(task, algorithm, 2, **more)
        return record.train_loss

    assert last("fedavg") == last(fx.fedavg(), weighting="size") != last(fx.fedavg())
    assert last("fedavg", weighting="uniform") == last(fx.fedavg())


def test_a_rule_that_changes_its_arguments_in_place_is_refused() -> None:
    @dataclass(frozen=True)
    class InPlace(fx.ServerRule):
        of: str

        def init(self, params: torch.Tensor) -> Any:
            return {"mean": torch.zeros_like(params)}

        def step(self, params: torch.Tensor, aggregate: fx.Aggregate, state: Any) -> Any:
            own = {"params": params, "state": state["mean"], "copy": params.clone()}[self.of]
            own -= aggregate.mean
            return params - aggregate.mean, state, {"server_lr": torch.ones(())}

    class Broadcast(fx.ClientRule):
        def init_broadcast(self, params: torch.Tensor) -> Any:
            return {"mean": torch.zeros_like(params)}

        def update_broadcast(self, broadcast: Any, aggregate: fx.Aggregate, total: float) -> Any:
            broadcast["mean"].add_(aggregate.mean)
            return broadcast

    def run(algorithm: fx.Algorithm) -> None:
        next(iter(fx.simulate(least_squares(), algorithm, 1)))

    for of in ("params", "state"):
        with pytest.raises(fx.UsageError, match="step of InPlace changes its arguments in place"):
            run(fx.Algorithm("own", server=InPlace(of)))
    with pytest.raises(fx.UsageError, match="update_broadcast of Broadcast changes its arguments"):
        run(fx.Algorithm("own", client=Broadcast(), server=fx.fedavg().server))
    run(fx.Algorithm("own", server=InPlace("copy")))
    with torch.inference_mode():  # such tensors do not count writes
        run(fx.fedavg())


@pytest.mark.parametrize("name", ["round", "test_accuracy", "seconds"])
def test_a_rule_cannot_report_a_field_of_the_record(name: str) -> None:
    @dataclass(frozen=True)
    class Own(fx.ServerRule):
        def step(self, params: torch.Tensor, aggregate: fx.Aggregate, state: Any) -> Any:
            return params - aggregate.mean, state, {name: torch.ones(())}

    with pytest.raises(fx.UsageError, match=f"step of Own reports a metric called {name}, which"):
        fx.simulate(least_squares(), fx.Algorithm("own", server=Own()), 1)


def test_a_rule_cannot_report_a_metric_of_the_task() -> None:
    @dataclass(frozen=True)
    class Own(fx.ServerRule):
        def step(self, params: torch.Tensor, aggregate: fx.Aggregate, state: Any) -> Any:
            return params - aggregate.mean, state, {"train_largest": torch.ones(())}

    metrics = as_metrics({"largest": lambda outputs, targets: outputs.max().item()})
    task = replace(fx.tasks.digits(), test=None, metrics=metrics)
    with pytest.raises(fx.UsageError, match="Own reports train_largest, which is a metric of the"):
        next(iter(fx.simulate(task, fx.Algorithm("own", server=Own()), 1)))


def test_layers_that_write_to_their_parameters_do_not_change_the_server() -> None:
    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3, max_norm=0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.table(x.abs().long().clamp(max=4)).mean(1)
            return out

    task = classes_task(Bounded)
    state = fx.SimulationState.initial(task, fx.fedavg(), 0)
    before = state.params.clone()
    next(fx.simulate(task, fx.fedavg(), 1, start=state, engine="loop"))
    assert torch.equal(state.params, before)


def test_half_precision_models_are_not_taken_for_diverged() -> None:
    task = classes_task(lambda: nn.Linear(4, 3).half())
    fields = {**task.train.fields, "x": task.train.fields["x"].half()}
    task = replace(task, train=replace(task.train, fields=fields), test=None)
    state = fx.SimulationState.initial(task, fx.fedavg(), 0)
    big = replace(state, params=state.params + 30)
    assert len(list(fx.simulate(task, fx.fedavg(), 1, start=big, engine="loop"))) == 1


def test_a_first_round_without_clients_does_not_put_the_start_into_the_mean() -> None:
    task, exp = least_squares(), fx.fedexp()
    state = replace(fx.SimulationState.initial(task, exp, 0), round=1)  # as after such a round
    record = next(fx.simulate(task, exp, 2, start=state))
    assert torch.equal(record.state.output()[0], record.state.params)


def test_evaluation_at_intervals_and_at_the_end() -> None:
    records = list(fx.simulate(least_squares(), fx.fedavg(), 5, evaluate_every=2))
    assert [r.train_loss is not None for r in records] == [False, True, False, True, True]


class Saboteur(LeastSquares):
    """Least squares whose gradient is wrong for some clients, recognised by their rows."""

    def __init__(self, start: Tensor, bad_clients: set[int], value: float) -> None:
        super().__init__(start)
        self.bad_clients, self.value = bad_clients, value

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        grad, buffers = super().gradient(params, buffers, batch)
        client = batch["x"].storage_offset() // batch["x"].numel()
        return (grad + self.value if client in self.bad_clients else grad), buffers


def sabotaged(bad: set[int], value: float = math.nan) -> fx.tasks.Task:
    task = least_squares()
    return replace(task, objective=Saboteur(task.objective.initial(0)[0], bad, value))


@pytest.mark.parametrize("algorithm", [fx.fedexp(), fx.scaffold_exp()], ids=rule_id)
def test_a_broken_client_is_dropped_counted_and_warned_about_once(
    algorithm: fx.Algorithm,
) -> None:
    with pytest.warns(fx.NonFiniteUpdateWarning, match="round 1: 1 client") as caught:
        records = list(fx.simulate(sabotaged({2}), algorithm, 4, engine="loop"))
    assert len(caught) == 1
    assert [(r.clients, r.dropped) for r in records] == [(3, 1)] * 4
    assert records[-1].train_loss is not None
    assert math.isfinite(records[-1].train_loss)
    assert 2 not in records[-1].state.clients


def test_when_all_are_dropped_the_model_stays_as_it_was() -> None:
    with pytest.warns(fx.NonFiniteUpdateWarning):
        records = list(fx.simulate(sabotaged({0, 1, 2, 3}), fx.fedavgm(), 3, engine="loop"))
    assert all(torch.equal(r.state.params, torch.zeros(20).double()) for r in records)
    assert [(r.clients, r.dropped, r.server_lr) for r in records] == [(0, 4, None)] * 3


@pytest.mark.parametrize("lr", [1e3, 1e30, 1e200])
def test_a_run_that_diverges_raises_with_its_round(lr: float) -> None:
    done: deque[fx.Record] = deque()
    run = fx.simulate(least_squares(), fx.fedavg(lr=lr), 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fx.NonFiniteUpdateWarning)
        with pytest.raises(fx.DivergedError, match="diverged at round") as caught:
            done.extend(run)
    assert caught.value.round == len(done) + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cohort": 5}, "larger than the federation of 4"),
        ({"cohort": 0}, "at least 1"),
        ({"rounds": 0}, "rounds"),
        ({"seed": -1}, "seed"),
        ({"weighting": "random"}, "weighting"),
        ({"evaluate_every": 0}, "evaluate_every"),
        ({"engine": "warp"}, "engine"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(options: dict, message: str) -> None:
    with pytest.raises(fx.UsageError, match=message):
        fx.simulate(least_squares(), fx.fedavg(), **{"rounds": 2, **options})


def test_sums_in_pieces_give_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop sums a few updates at a time, so its memory does not grow with the cohort."""
    task = least_squares(clients=9)
    whole = list(fx.simulate(task, fx.scaffold_exp(), 3, engine="loop"))
    monkeypatch.setattr("fedexp.engine.base.SUMMED_BYTES", 2 * 20 * 8)
    pieces = list(fx.simulate(task, fx.scaffold_exp(), 3, engine="loop"))
    torch.testing.assert_close(
        whole[-1].state.params, pieces[-1].state.params, rtol=1e-12, atol=1e-14
    )


def test_bytes_are_those_of_trained_parameters_buffers_and_states() -> None:
    """A linear layer is frozen; every client of the cohort sends, the dropped ones too."""

    class Frozen(BatchNormNet):
        def __init__(self) -> None:
            super().__init__()
            self.first.requires_grad_(False)

    trained, floats, counter = 4 * (12 + 21), 4 * 12, 8
    task = classes_task(Frozen)
    for engine in ("loop", "batched", "threads"):
        for algorithm, control in ((fx.fedexp(), 0), (fx.scaffold_exp(), trained)):
            record = next(fx.simulate(task, algorithm, 1, 3, engine=engine))
            assert record.bytes_up == 3 * (trained + floats + control)
            assert record.bytes_down == 3 * (trained + floats + counter + control)
            assert record.to_json()["bytes_up"] == record.bytes_up
    with pytest.warns(fx.NonFiniteUpdateWarning):
        record = next(fx.simulate(sabotaged({2}), fx.fedavg(), 1, engine="loop"))
    assert (record.clients, record.bytes_up, record.bytes_down) == (3, 4 * 160, 4 * 160)


def test_bytes_follow_the_cohort() -> None:
    sizes = [3, 1, 4]
    run = fx.simulate(least_squares(), fx.fedavg(), 3, lambda rng, t, _: range(sizes[t - 1]))
    assert [record.bytes_up for record in run] == [160 * size for size in sizes]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (fx.tasks.toy, fx.fedavg()),
            r"toy is not a Task until it is called; give fedexp\.tasks\.toy\(\)",
        ),
        ((fx.tasks.Task, fx.fedavg()), "Task is not a Task until it is called"),
        ((3, fx.fedavg()), "int is not a Task or the name of one"),
        (
            (fx.tasks.toy(), fx.fedavg),
            r"fedavg is not an Algorithm until .*; give fedexp\.fedavg\(\)",
        ),
        ((fx.tasks.toy(), fx.ExP), "ExP is not an Algorithm until it is called"),
        ((fx.tasks.toy(), fx.ExP()), r'ExP is not an Algorithm .*; give fedexp\.Algorithm\("name"'),
        ((fx.tasks.toy(), fx.fedavg(), 2.5), "rounds must be a whole number: 2.5"),
        ((fx.tasks.toy(), fx.fedavg(), 0), "rounds must be at least 1, not 0"),
        ((fx.tasks.toy(), fx.fedavg(), 1, None, "a"), "seed must be a whole number: 'a'"),
    ],
)
def test_mistakes_get_one_line_with_a_remedy(arguments: tuple, message: str) -> None:
    with pytest.raises(fx.UsageError, match=message):
        fx.simulate(*arguments)
    with pytest.raises(fx.UsageError, match=r"local is dict; give fedexp\.LocalTraining"):
        fx.simulate(fx.tasks.toy(), fx.fedavg(), local={"lr": 0.1})  # type: ignore[arg-type]


def test_whole_numbers_of_numpy() -> None:
    numbers = {"rounds": np.int64(2), "seed": np.int64(3), "evaluate_every": np.int32(1)}
    plain = {"rounds": 2, "seed": 3, "evaluate_every": 1}
    one, other = (
        list(fx.simulate(classes_task(), fx.fedexp(), cohort=2, **each))
        for each in (numbers, plain)
    )
    assert [r.state.params.tolist() for r in one] == [r.state.params.tolist() for r in other]
    json.dumps(one[-1].to_json())
