"""Runs that share programs give the numbers of separate runs, bit for bit.

`Replayed` stands for a CUDA graph: constants are those of the program that was captured, inputs are
copied into place, and the next call overwrites the outputs.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx
from fedexp.client import Tensors
from fedexp.data import Federation, Images
from fedexp.engine.cuda_graph import Program
from fedexp.engine.programs import MOST_TRIALS, SharedPrograms, objective_key
from fedexp.errors import EngineWarning
from fedexp.experiment import Resources
from fedexp.objective import ModuleObjective
from fedexp.tasks import Task
from tests.engine.helpers import double_batch_norm, images, small_resnet, unequal
from tests.helpers.problems import dropout_net, least_squares


class Replayed:
    """A program with the inputs and outputs of a CUDA graph."""

    def __init__(self, program: Program, inputs: Tensors, warm_up: Program | None) -> None:
        self.program = program
        self.inputs = {name: value.clone() for name, value in inputs.items()}
        self.outputs = dict(program(self.inputs))

    def __call__(self, inputs: Tensors) -> Tensors:
        for name, value in inputs.items():
            self.inputs[name].copy_(value)
        for name, value in self.program(self.inputs).items():
            self.outputs[name] = self.outputs[name].clone()
            self.outputs[name].copy_(value)
        return self.outputs


def sharing(**settings: Any) -> SharedPrograms:
    return SharedPrograms(graphs=True, capture=Replayed, **settings)


@dataclass(frozen=True)
class Case:
    """The arguments of a run."""

    task: Task
    algorithm: fx.Algorithm
    options: dict[str, Any]

    def records(
        self, programs: SharedPrograms | None, state: fx.SimulationState | None = None
    ) -> Iterator[fx.Record]:
        options = {"rounds": 3, "cohort": 3, "engine": "batched", **self.options}
        experiment = fx.Experiment(self.task, self.algorithm, **options)
        return experiment.records(state, Resources(programs=programs))


def assert_same_runs(one: list[fx.Record], other: list[fx.Record]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        plain: dict[str, Any] = {"seconds": 0.0, "engine_choice": None}
        assert replace(a, **plain) == replace(b, **plain)
        for tensors in zip(
            [a.state.params, a.state.output()[0], *a.state.buffers],
            [b.state.params, b.state.output()[0], *b.state.buffers],
            strict=True,
        ):
            assert torch.equal(*tensors)
        assert set(a.state.clients) == set(b.state.clients)
        for client, own in a.state.clients.items():
            for name, value in own.items():
                assert torch.equal(value, b.state.clients[client][name])


def assert_shared_as_alone(
    cases: list[Case], make: Callable[[], SharedPrograms] = sharing
) -> SharedPrograms:
    """Assert that runs one after another are those with programs of their own."""
    programs = make()
    for case in cases:
        assert_same_runs(list(case.records(programs)), list(case.records(make())))
    return programs


class Thin(nn.Module):
    """Three inputs to three classes, with a setting that no shape shows."""

    def __init__(self, slope: float = 0.1, frozen: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.scale = nn.Parameter(torch.tensor(frozen).double(), requires_grad=False)
        self.table = torch.tensor(frozen).double()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(F.leaky_relu(x, self.slope)) * self.scale + self.table * 0.01
        return out


def weighted(outputs: Tensor, targets: Tensor, factor: float = 1.0) -> Tensor:
    return factor * F.cross_entropy(outputs, targets, reduction="none")


def with_objective(task: Task, *args: Any, **settings: Any) -> Task:
    return replace(task, objective=ModuleObjective(*args, **settings))


def with_data(task: Task, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Task:
    fields = change(dict(task.train.fields))
    return replace(task, train=Federation(fields, task.train.offsets), test=fields)


PLAIN = unequal()
PICTURES = images()
THIN = with_objective(PLAIN, Thin)
LOCAL = PLAIN.local
MOMENTUM, ADAM = replace(LOCAL, momentum=0.5), replace(LOCAL, optimizer="adam", lr=0.01)
SCALED = functools.partial(weighted, factor=2.0)


def fedexp_on(task: Task, **options: Any) -> Case:
    return Case(task, fx.fedexp(), options)


SERVERS = {
    "eps": (fx.fedexp(0.0), fx.fedexp(0.01)),
    "factor": (fx.fedexp(0.0), fx.fedexp(0.0, factor=1.0)),
    "eps_mode": (fx.fedexp(eps=0.05), fx.fedexp(eps=0.05, eps_mode="relative")),
    "server lr": (fx.fedavg(1.0), fx.fedavg(0.5)),
    "server beta": (fx.fedavgm(beta=0.9), fx.fedavgm(beta=0.5)),
    "server rule": (fx.fedavg(), fx.fedexp()),
    "client rule": (fx.fedavg(), fx.scaffold()),
    "mu": (fx.fedprox(0.1), fx.fedprox(1.0)),
}
LOCALS = {
    "clip_norm": (replace(LOCAL, clip_norm=0.1), replace(LOCAL, clip_norm=0.2)),
    "no clip_norm": (LOCAL, replace(LOCAL, clip_norm=0.05)),
    "weight_decay": (LOCAL, replace(LOCAL, weight_decay=0.1)),
    "momentum": (MOMENTUM, replace(MOMENTUM, momentum=0.9)),
    "nesterov": (MOMENTUM, replace(MOMENTUM, nesterov=True)),
    "optimizer": (ADAM, replace(ADAM, optimizer="adamw", weight_decay=0.1)),
    "betas": (ADAM, replace(ADAM, betas=(0.5, 0.9))),
    "adam_eps": (ADAM, replace(ADAM, adam_eps=1e-2)),
    "batch_size": (LOCAL, replace(LOCAL, batch_size=4)),
    "steps": (LOCAL, replace(LOCAL, steps=3)),
    "step_schedule": (LOCAL, replace(LOCAL, step_schedule="linear")),
}
TASKS = {
    "transform": (PICTURES, replace(PICTURES, transform=Images((0.4,) * 3, (0.25,) * 3))),
    "a setting of the model": (THIN, with_objective(PLAIN, functools.partial(Thin, 0.5))),
    "constants of the model": (THIN, with_objective(PLAIN, functools.partial(Thin, 0.1, 2.0))),
    "the model": (PLAIN, THIN),
    "the loss": (with_objective(PLAIN, Thin, weighted), with_objective(PLAIN, Thin, SCALED)),
    "the data": (PLAIN, with_data(PLAIN, lambda f: {**f, "x": f["x"] * 2})),
    "the labels": (PLAIN, with_data(PLAIN, lambda f: {**f, "y": 2 - f["y"]})),
}
SIZED = Case(PLAIN, fx.scaffold(), {"weighting": "size"})
DIFFERENT: dict[str, tuple[Case, Case]] = {
    **{n: (Case(PLAIN, one, {}), Case(PLAIN, other, {})) for n, (one, other) in SERVERS.items()},
    **{n: (fedexp_on(PLAIN, local=a), fedexp_on(PLAIN, local=b)) for n, (a, b) in LOCALS.items()},
    **{n: (fedexp_on(one), fedexp_on(other)) for n, (one, other) in TASKS.items()},
    "weighting": (Case(PLAIN, fx.scaffold(), {}), SIZED),
    "the cohort": (fedexp_on(PLAIN), fedexp_on(PLAIN, cohort=4)),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_runs_that_differ_in_one_setting_are_those_of_separate_processes(
    pair: tuple[Case, Case],
) -> None:
    one, other = pair
    alone = [list(case.records(sharing())) for case in pair]
    assert not torch.equal(alone[0][-1].state.params, alone[1][-1].state.params)
    assert_shared_as_alone([one, other, one, other])


def test_what_is_an_input_shares_the_program() -> None:
    cases = [Case(PICTURES, fx.fedexp(), {"seed": seed, "cohort": 4}) for seed in range(3)]
    local = replace(PICTURES.local, lr=0.1, lr_decay=0.9, decay_before_first_round=True)
    cases.append(Case(PICTURES, fx.fedexp(), {"local": local, "cohort": 4}))
    again = replace(local, lr_schedule=lambda round: 1 / round)
    cases.append(Case(PICTURES, fx.fedexp(), {"local": again, "cohort": 4}))
    alone = sharing()
    list(cases[0].records(alone))
    programs = assert_shared_as_alone(cases)
    assert (programs.trials, programs.captures, programs.copies) == (1, alone.captures, 1)


def test_algorithms_of_one_client_rule_share_the_trial_and_not_the_program() -> None:
    algorithms = [fx.fedavg(), fx.fedexp(), fx.fedadam(), fx.fedexp(0.5)]
    cases = [Case(PICTURES, each, {"seed": s, "cohort": 4}) for each in algorithms for s in (0, 1)]
    programs = assert_shared_as_alone(cases)
    assert (programs.trials, programs.captures) == (1, len(algorithms))
    reasons = [next(case.records(programs)).engine_choice for case in cases[:1]]
    assert "an earlier run of this process" in getattr(reasons[0], "reason", "")


def partitions(count: int) -> list[Task]:
    """Return tasks that are built anew, with the examples of one data set in another order."""
    tasks = []
    for seed in range(count):
        rng, task = np.random.default_rng(seed), images()
        order = torch.from_numpy(rng.permutation(34))
        fields = {name: value[order] for name, value in task.train.fields.items()}
        tasks.append(replace(task, train=Federation(fields, task.train.offsets)))
    return tasks


def test_another_partition_overwrites_the_examples() -> None:
    tasks = partitions(3)
    before = [{n: v.clone() for n, v in task.train.fields.items()} for task in tasks]
    cases = [
        Case(task, algorithm, {"seed": seed, "cohort": 4})
        for seed, task in enumerate(tasks)
        for algorithm in (fx.fedexp(), fx.scaffold())
    ]
    programs = assert_shared_as_alone(cases)
    assert (programs.trials, programs.captures, programs.copies) == (2, 2, 3)
    for task, fields in zip(tasks, before, strict=True):  # the caller's are not written to
        assert all(torch.equal(value, fields[name]) for name, value in task.train.fields.items())


def test_runs_may_take_turns() -> None:
    programs = sharing()
    cases = [
        Case(task, fx.scaffold_exp(), {"seed": seed, "cohort": 4})
        for seed, task in enumerate(partitions(2))
    ]
    together = list(zip(*(case.records(programs) for case in cases), strict=True))
    for case, records in zip(cases, zip(*together, strict=True), strict=True):
        assert_same_runs(list(records), list(case.records(sharing())))


def test_runs_of_another_task_in_between_leave_the_examples_alone() -> None:
    """The copy of two partitions is dropped for another task while both still train."""
    programs = sharing()
    cases = [fedexp_on(task, seed=s, cohort=4) for s, task in enumerate(partitions(2))]
    cases.append(fedexp_on(with_data(PLAIN, lambda f: {**f, "x": f["x"] * 2})))
    cases.append(fedexp_on(unequal(sizes=(3, 40, 17, 8, 1, 26))))  # one example more
    together = list(zip(*(case.records(programs) for case in cases), strict=True))
    for case, records in zip(cases, zip(*together, strict=True), strict=True):
        assert_same_runs(list(records), list(case.records(sharing())))


def test_data_that_were_written_to_are_copied_again() -> None:
    task, programs = partitions(1)[0], sharing()
    case = Case(task, fx.fedexp(), {"cohort": 4})
    list(case.records(programs))
    task.train.fields["x"].fill_(7)
    assert_same_runs(list(case.records(programs)), list(case.records(sharing())))


def test_results_of_data_that_were_written_to_are_not_used() -> None:
    """On a CPU examples are not copied, and an engine may hold results of them."""
    task, programs = least_squares(clients=4), SharedPrograms()
    case = Case(task, fx.fedexp(), {"engine": "quadratic"})
    list(case.records(programs))
    task.train.fields["x"].mul_(0.5)
    assert_same_runs(list(case.records(programs)), list(case.records(SharedPrograms())))


def test_trials_of_few_models_are_remembered() -> None:
    programs = SharedPrograms()
    for number in range(MOST_TRIALS + 2):
        programs.note_agreement(number)
    assert programs.trials == MOST_TRIALS + 2
    assert not programs.has_agreed(1)
    assert programs.has_agreed(2)


def test_what_was_planned_for_another_run_is_not_used() -> None:
    """With all clients in every round, the plans differ in batches and augmentation alone."""
    programs = sharing()
    whole = {"cohort": "all", "rounds": 4}
    list(islice(Case(PICTURES, fx.fedexp(), whole).records(programs), 1))
    other = Case(PICTURES, fx.fedexp(), {**whole, "seed": 1})
    first = next(other.records(sharing()))
    resumed = list(other.records(programs, first.state))
    assert_same_runs(resumed, list(other.records(sharing()))[1:])


@pytest.mark.parametrize("make", [sharing, SharedPrograms, functools.partial(sharing, most=1)])
def test_draws_of_layers_do_not_depend_on_earlier_runs(make: Callable[[], SharedPrograms]) -> None:
    task = unequal(lambda: dropout_net().double())
    cases = [
        Case(task, algorithm, {"seed": seed, "engine": engine})
        for engine in ("batched", "threads", "loop")
        for algorithm in (fx.fedexp(), fx.scaffold())
        for seed in (0, 1)
    ]
    assert_shared_as_alone([*cases, *cases[:4]], make)


@pytest.mark.parametrize("engine", ["loop", "threads", "batched", "dense", "quadratic", "auto"])
def test_every_engine_on_a_cpu_gives_the_bits_of_a_run_without_sharing(engine: str) -> None:
    task = least_squares(clients=6) if engine == "quadratic" else unequal(mlp)
    if engine == "quadratic":
        task = replace(task, local=fx.LocalTraining(lr=0.1, steps=9, batch_size=None))
    programs = SharedPrograms()
    for device in (None, "cpu"):
        for seed in (0, 1):
            for algorithm in (fx.fedexp(), fx.scaffold(), fx.fedprox(), fx.fedexp(0.5)):
                options = {"seed": seed, "engine": engine, "device": device}
                case = Case(task, algorithm, options)
                assert_same_runs(list(case.records(programs)), list(case.records(None)))
    assert programs.copies == programs.captures == 0
    assert programs.trials <= (0 if engine == "loop" else 3)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def test_buffers_start_anew() -> None:
    task = unequal(double_batch_norm, (7, 7, 7))
    cases = [Case(task, fx.fedexp(), {"seed": seed}) for seed in (0, 1, 0)]
    assert_shared_as_alone(cases)


def test_the_engine_that_was_not_used_for_longest_is_dropped() -> None:
    algorithms = [fx.fedavg(), fx.fedexp(), fx.fedadam(), fx.fedavg(), fx.fedadam()]
    cases = [Case(PICTURES, each, {"cohort": 4}) for each in algorithms]
    assert assert_shared_as_alone(cases, functools.partial(sharing, most=2)).captures == 4
    assert assert_shared_as_alone(cases, functools.partial(sharing, most=1)).captures == 5


class Failing:
    """Captures nothing while `error` is set."""

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        self.once = False

    def __call__(self, program: Program, inputs: Tensors, warm_up: Program | None) -> Program:
        error = self.error
        if error is not None:
            self.error = None if self.once else error
            raise error
        return Replayed(program, inputs, warm_up)


def test_a_run_that_cannot_be_captured_does_not_keep_the_next_one_from_it() -> None:
    capture = Failing()
    programs = SharedPrograms(graphs=True, capture=capture)
    case = Case(PICTURES, fx.fedexp(), {"cohort": 4})
    capture.error = RuntimeError("operation not permitted when stream is capturing")
    with pytest.warns(EngineWarning, match="not captured"):
        records = list(case.records(programs))
    assert records[-1].engine_choice is not None
    assert records[-1].engine_choice.cuda_graph is None
    capture.error = None
    records = list(case.records(programs))
    assert records[-1].engine_choice is not None
    assert records[-1].engine_choice.cuda_graph == "round"
    assert_same_runs(records, list(case.records(sharing())))


def test_where_memory_runs_out_the_graphs_of_other_runs_are_dropped() -> None:
    capture = Failing()
    programs = SharedPrograms(graphs=True, capture=capture)
    one, other = (Case(PICTURES, each, {"cohort": 4}) for each in (fx.fedavg(), fx.fedexp()))
    list(one.records(programs))
    capture.error, capture.once = torch.OutOfMemoryError("out of memory"), True
    records = list(other.records(programs))
    assert records[-1].engine_choice is not None
    assert records[-1].engine_choice.cuda_graph == "round"
    assert_same_runs(records, list(other.records(sharing())))
    assert programs.captures == 2
    list(one.records(programs))
    assert programs.captures == 3


def test_dropped_programs_free_their_memory_at_once() -> None:
    captured: list[weakref.ref[Replayed]] = []

    def capture(program: Program, inputs: Tensors, warm_up: Program | None) -> Program:
        replayed = Replayed(program, inputs, warm_up)
        captured.append(weakref.ref(replayed))
        return replayed

    programs = SharedPrograms(graphs=True, capture=capture, most=1)
    gc.disable()
    try:
        for algorithm in (fx.fedavg(), fx.fedexp()):
            list(Case(PICTURES, algorithm, {"cohort": 4}).records(programs))
        assert [each() is None for each in captured] == [True, False]
        programs.clear()
        assert captured[1]() is None
    finally:
        gc.enable()


# Keys -------------------------------------------------------------------------------------------


TEMPERATURE = 1.0


class Tempered(Thin):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / TEMPERATURE


def tempered(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs / TEMPERATURE, targets, reduction="none")


@pytest.mark.parametrize("where", ["model", "loss"])
def test_numbers_that_a_model_or_a_loss_reads_as_globals_count(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, loss = (Tempered, None) if where == "model" else (Thin, tempered)
    case, programs = fedexp_on(with_objective(PLAIN, build, loss)), sharing()
    for temperature in (1.0, 2.0, 1.0):
        monkeypatch.setitem(globals(), "TEMPERATURE", temperature)
        assert_same_runs(list(case.records(programs)), list(case.records(sharing())))
    assert programs.trials == 2


def test_models_are_equal_by_layers_settings_and_constants() -> None:
    def key(*args: Any) -> Any:
        return objective_key(ModuleObjective(functools.partial(Thin, *args)))

    assert key() == key()
    assert hash(key()) == hash(key())
    assert key(0.1, 1.0) != key(0.2, 1.0)
    assert key(0.1, 1.0) != key(0.1, 2.0)
    objective = ModuleObjective(small_resnet)
    assert objective_key(objective) == objective_key(objective.copy())
    assert objective_key(objective) != objective_key(objective.copy(torch.float32))
    objective.gradient(*objective.initial(1), batch_of(PICTURES))
    assert objective_key(objective) == objective_key(ModuleObjective(small_resnet))


def batch_of(task: Task) -> Any:
    assert task.transform is not None
    return task.transform.evaluate(task.train.client(0))


class Own(ModuleObjective):
    """An objective with a setting that its class does not declare."""

    factor = 1.0


def test_objectives_of_other_classes_are_equal_to_themselves_alone() -> None:
    one = Own(Thin)
    assert objective_key(one) == objective_key(one)
    assert objective_key(one) != objective_key(Own(Thin))
