"""`Experiment`: names and None become objects, its spec repeats the run and decides its id."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import fedexp as fx
from fedexp.catalogue import TASKS
from fedexp.experiment import Experiment, experiments
from fedexp.plain import id_of
from fedexp.privacy.settings import CentralPrivacy, LocalPrivacy
from fedexp.runs import read_spec
from fedexp.runs.spec import read_experiment, spec_text
from fedexp.tasks import Task
from tests.helpers.errors import assert_refused
from tests.helpers.own_study import write_study
from tests.runs.helpers import TINY, tiny

TASK = tiny().problem


def without_address(value: object) -> str:
    """Return the id of a parameter, the same in every process."""
    return re.sub(r" at 0x\w+", "", str(value))


def test_none_is_the_value_of_the_task() -> None:
    task = fx.tasks.toy()
    exact = Experiment("toy").resolved
    assert (exact.rounds, exact.evaluate_every) == (task.rounds, task.evaluate_every)
    assert (exact.cohort, exact.local, exact.weighting) == ("all", task.local, "uniform")
    assert exact.algorithm == fx.fedexp(eps=0, factor=1)  # the values that are tuned for the task
    plain: dict[str, Any] = {
        "mode": None,
        "engine": None,
        "options": None,
        "deterministic": None,
        "seed": None,
    }
    assert Experiment("toy", **plain).spec == Experiment("toy").spec


def test_an_object_is_taken_as_it_is_and_options_change_it() -> None:
    local = fx.LocalTraining(lr=0.3, steps=7)
    experiment = Experiment(
        TASK, fx.fedexp(eps=0.5), local=local, weighting="size", options={"local.lr": "0.2"}
    )
    exact = experiment.resolved
    assert experiment.problem is exact.task is TASK
    assert exact.algorithm == fx.fedexp(eps=0.5)
    assert exact.local == fx.LocalTraining(lr=0.2, steps=7)
    assert exact.weighting == "size"
    assert exact.resolved is exact
    assert experiment.spec == exact.replace(mode="paper").spec


@pytest.mark.parametrize(
    ("mode", "eps_mode", "weighting"),
    [("paper", "absolute", "uniform"), ("authors-code", "participants", "size"),
     ("recommended", "relative", "uniform")],
)  # fmt: skip
def test_a_mode_is_what_a_name_means(mode: str, eps_mode: str, weighting: str) -> None:
    experiment = Experiment("digits", "fedexp", mode=mode, options={"eps": 0.25})
    options = experiment.setup.options()
    assert (options["server.eps"], options["server.eps_mode"]) == (0.25, eps_mode)
    assert options["weighting"] == weighting


def choose(rng: np.random.Generator, round: int, federation: fx.Federation) -> list[int]:
    return [round % federation.clients]


@pytest.mark.parametrize(
    ("cohort", "expected"),
    [
        (None, "all"),
        ("all", "all"),
        (1.0, "all"),
        (1, 1),
        (np.int64(2), 2),
        (0.5, 0.5),
        ([3, np.int64(1)], (3, 1)),
        (np.array([3, 1]), (3, 1)),
        (choose, choose),
    ],
    ids=without_address,
)
def test_the_forms_of_a_cohort(cohort: Any, expected: Any) -> None:
    experiment = Experiment(TASK, "fedavg", rounds=2, cohort=cohort)
    assert experiment.resolved.cohort == expected
    stored = experiment.spec.get("cohort", "all")
    assert stored == (list(expected) if isinstance(expected, tuple) else stored)
    assert Experiment.of(experiment.spec).spec == experiment.spec
    assert len(list(experiment.records())) == 2


def test_a_cohort_that_the_task_brings_needs_no_source() -> None:
    spec = Experiment(replace(TASK, cohort=choose)).spec
    assert "cohort_source" not in spec
    assert Experiment.of(spec).cohort is None


@pytest.mark.parametrize(
    ("every", "evaluated"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), ((3, 2), [3, 6, 7]),
                             ((5, 4), [4, 5, 6, 7]), ((1, 1), [1, 2, 3, 4, 5, 6, 7])],
)  # fmt: skip
def test_rounds_that_are_evaluated(every: Any, evaluated: list[int]) -> None:
    experiment = Experiment("toy", rounds=7, evaluate_every=every)
    records = list(experiment.records())
    assert [r.round for r in records if r.train_loss is not None] == evaluated
    spec = experiment.spec
    assert spec["evaluate_every"] == (list(every) if isinstance(every, tuple) else every)
    assert Experiment.of(spec).evaluate_every == every


def test_records_end_where_the_target_is_reached() -> None:
    losses = [record.train_loss or 0 for record in Experiment("toy", rounds=9).records()]
    until = list(Experiment("toy", rounds=9, stop_at=losses[3]).records())
    reached = next(k for k, loss in enumerate(losses) if loss <= losses[3])
    assert len(until) == reached + 1
    assert until[-1].train_loss == losses[reached]


POSITIVE = st.floats(1e-300, 1e300)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "eps": POSITIVE,
        "local.lr": POSITIVE | POSITIVE.map(repr),
        "local.clip_norm": POSITIVE | st.none(),
        "server.max_step": st.floats(1, allow_nan=False),
        "local.epochs": st.integers(1, 10**9) | st.none(),
        "task.normalize": st.booleans(),
        "task.seed": st.integers(0, 3),
    },
)
EXPERIMENTS = st.builds(
    partial(tiny, rounds=9),
    algorithm=st.sampled_from(["fedexp", "fedexp-m", "scaffold-exp"]),
    seed=st.integers(0, 2**70),
    cohort=st.sampled_from([None, "all", 2, 0.5, (2, 0)]),
    mode=st.sampled_from(["paper", "authors-code", "recommended"]),
    local=st.sampled_from([None, fx.LocalTraining(lr=0.3, steps=3)]),
    weighting=st.sampled_from([None, "uniform", "size"]),
    evaluate_every=st.none() | st.integers(1, 50) | st.tuples(st.integers(1, 9), st.integers(1, 9)),
    engine=st.sampled_from(["auto", "loop", "batched"]),
    device=st.sampled_from([None, "cpu", "cuda:0"]),
    precision=st.sampled_from([None, "float32", "bf16"]),
    stop_at=st.none() | POSITIVE,
    deterministic=st.booleans(),
    by_client=st.booleans(),
    privacy=st.sampled_from(
        [None, CentralPrivacy(1.0, 1e-5, 2.0), LocalPrivacy(1.0, 1e-5, 2.0, noise_seed=3)]
    ),
    options=OPTIONS,
)


@given(experiment=EXPERIMENTS)
def test_an_experiment_comes_back_from_its_file(experiment: Experiment) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "spec.toml"
        path.write_text(spec_text(experiment.spec))
        stored = read_spec(path.parent)
        by_hand = read_experiment(path)
    assert stored["id"] == experiment.id
    for other in (Experiment.of(stored), by_hand, Experiment.of(experiment.spec)):
        assert other.spec == experiment.spec
        assert other.id == experiment.id
        assert other.setup == experiment.setup
    assert pickle.loads(pickle.dumps(experiment.portable)).spec == experiment.spec


OBJECTS: dict[str, Any] = {"local": fx.LocalTraining(lr=0.3, steps=7), "weighting": "size"}
PRIVATE = LocalPrivacy(1.0, 1e-5, 2.0)
IDS: dict[str, Callable[[], Experiment]] = {
    "toy-fedexp-s0-aad7c6de86": lambda: Experiment("toy"),
    "toy-fedavg-s3-b9bac4a79b": lambda: Experiment("toy", "fedavg", 3, 7, 1, evaluate_every=2),
    "toy-fedavg-s0-abefd7a3d9": lambda: Experiment("toy", "fedavg", cohort=(1, 0)),
    "toy-fedexp-s0-6e0f875e8c": lambda: Experiment(
        "toy", mode="authors-code", options={"eps": 0.5}
    ),
    "toy-fedexp-s0-78c30d5eae": lambda: Experiment(
        "toy", privacy=PRIVATE, options={"local.clip_norm": 1}
    ),
    "synthetic-scaffold-s0-bdd6c25b37": lambda: tiny(
        "scaffold", precision="bf16", deterministic=True
    ),
    "digits-fedprox-s0-8413a28c53": lambda: Experiment(
        "digits", "fedprox", stop_at=90, by_client=True
    ),
    "digits-fedexp-s2-9d70de2075": lambda: Experiment(
        fx.tasks.digits(), fx.fedexp(eps=0.5), 2, rounds=5, **OBJECTS
    ),
}


@pytest.mark.parametrize("expected", IDS)
def test_the_id_of_a_run_is_stable(expected: str) -> None:
    """Stored runs are found by it."""
    assert IDS[expected]().id == expected


CHANGES: list[dict[str, Any]] = [
    {"algorithm": "fedexp"},
    {"seed": 1},
    {"rounds": 7},
    {"cohort": 2},
    {"mode": "authors-code"},
    {"local": fx.LocalTraining(lr=0.3)},
    {"weighting": "size"},
    {"evaluate_every": 2},
    {"engine": "loop"},
    {"device": "cpu"},
    {"precision": "float32"},
    {"stop_at": 0.5},
    {"deterministic": True},
    {"by_client": True},
    {"privacy": PRIVATE},
    {"options": {**TINY, "eps": 0.5}},
    {"options": {**TINY, "task.normalize": "no"}},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change)[:40])
def test_every_choice_is_part_of_the_id(change: dict[str, Any]) -> None:
    assert tiny().replace(**change).id != tiny().id


def test_the_weights_to_start_from_are_part_of_the_id(tmp_path: Path) -> None:
    experiment = Experiment("digits", "fedavg", rounds=1)
    weights = {"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10)}
    save_file(weights, tmp_path / "zeros.safetensors")
    started = experiment.replace(start=weights)
    assert started.id != experiment.id
    stored = experiment.replace(start=tmp_path / "zeros.safetensors")
    assert stored.id == started.id
    assert started.replace(start=str(stored.start)).spec == stored.spec
    assert Experiment.of(stored.spec).id == stored.id
    assert experiment.replace(start={**weights, "1.bias": torch.ones(10)}).id != started.id


def test_what_means_the_same_has_the_same_id() -> None:
    for options in ("eps", "0"), ("server.eps", "-0.0"), ("eps", "0e5"), ("task.normalize", "yes"):
        same = tiny("fedexp", options=dict([options]))
        assert same.id == tiny("fedexp").id  # these are the task's values
    assert tiny(cohort=1.0).id == tiny(cohort="all").id == tiny(cohort=None).id != tiny(cohort=1).id
    digits = Experiment("digits", "fedavg", stop_at=90)
    assert digits.replace(stop_at=0.9, rounds=digits.problem.rounds).id == digits.id
    assert Experiment("toy", fx.fedexp(eps=0, factor=1)).id == Experiment("toy", "fedexp").id
    assert Experiment("toy", local=fx.tasks.toy().local).id == Experiment("toy").id
    assert Experiment("toy", fx.fedavg(), options={"lr": 2.0}).id == (
        Experiment("toy", "fedavg", options={"server.lr": "2"}).id
    )


def test_the_spec_has_every_argument_of_the_task() -> None:
    assert tiny().spec["arguments"] == {"clients": 4, "rows": 3, "dim": 20, "normalize": True}
    assert tiny(options={"task.seed": 5}).spec["arguments"]["seed"] == 5
    assert Experiment("digits", "fedavg").spec["arguments"]["model"] == "logistic"
    assert Experiment(fx.tasks.toy()).spec["arguments"] == {}


def test_the_spec_names_the_options_that_change_something() -> None:
    of_task = ["task.clients", "task.rows", "task.dim"]
    assert tiny("fedexp", options={"eps": 0}).spec["changed"] == of_task
    spec = tiny("fedexp", options={"eps": "0.5"}).spec
    assert spec["changed"] == [*of_task, "server.eps"]
    assert spec["set"]["server.eps_mode"] == "absolute"  # the number goes with its unit
    assert Experiment("toy", "fedavg").spec["changed"] == []
    assert Experiment("toy", "fedavg", mode="authors-code").spec["changed"] == []


def test_a_spec_of_epochs_has_no_number_of_steps() -> None:
    spec = tiny("fedavg", options={"epochs": "2"}).spec
    assert (spec["options"]["local.steps"], spec["options"]["local.epochs"]) == ("none", 2)
    assert [name for name in spec["changed"] if "local" in name] == ["local.epochs"]


def test_text_for_people() -> None:
    experiment = tiny("fedavg", 1500, {"lr": 2})
    assert str(experiment) == (
        "fedavg on synthetic: seed 0, 1,500 rounds, 3 of 4 clients per round; "
        "task.clients=4, task.rows=3, task.dim=20, server.lr=2.0"
    )
    assert repr(Experiment("toy", "fedavg", rounds=3)) == (
        "Experiment(task='toy', algorithm='fedavg', rounds=3)"
    )


def test_a_copy_with_other_values() -> None:
    experiment = Experiment("toy", "fedavg", options={"lr": 2})
    assert experiment.with_options({"local.lr": 0.1}).options == {"lr": 2, "local.lr": 0.1}
    assert experiment.replace(rounds=3, options={}).setup.options()["server.lr"] == 1
    with pytest.raises(fx.UsageError, match="unknown argument 'round'; did you mean rounds"):
        experiment.replace(round=3)


def test_objects_of_the_users_become_references(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    experiment = Experiment(f"{path}:task", f"{path}:mine", rounds=2)
    assert experiment.names == ("mine", f"{path}:task", "sign", f"{path}:mine")
    loaded = experiment.replace(task=experiment.problem)
    assert loaded.spec == experiment.spec
    portable = pickle.loads(pickle.dumps(loaded.portable))
    assert (portable.task, portable.algorithm) == (f"{path}:task", f"{path}:mine")
    assert portable.references == [f"{path}:task", f"{path}:mine"]
    assert portable.session_object is None
    assert portable.id == experiment.id == Experiment.of(experiment.spec).id


def test_objects_of_this_session_are_named() -> None:
    task = replace(fx.tasks.toy(), name="here")
    assert Experiment(task).session_object == "task 'here'"
    assert Experiment("toy").session_object is None
    schedule = fx.LocalTraining(lr=0.1, steps=2, lr_schedule=lambda round: 1.0)
    experiment = Experiment("toy", local=schedule)
    assert experiment.session_object == "a function among the options"
    assert experiment.portable.spec == experiment.spec


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": fx.tasks.toy}, "toy is not a Task until it is called; give fedexp.tasks.toy()"),
        ({"algorithm": fx.fedavg}, "fedavg is not an Algorithm until it is called"),
        ({"task": 3}, "int is not a Task or the name of one; give fedexp.tasks.digits()"),
        ({"algorithm": TASK}, "Task is not an Algorithm or the name of one"),
        ({"local": 0.1}, "local is float; give fedexp.LocalTraining(lr=...)"),
        ({"options": [("eps", 1)]}, "options is list; give values by name"),
        ({"privacy": 1.0}, "privacy is float; give fedexp.privacy.CentralPrivacy"),
        ({"by_client": 1}, "by_client is int; give True or False"),
        ({"deterministic": "no"}, "deterministic is str; give True or False"),
        ({"stop_at": "0.9"}, "stop_at is str; give a number"),
        ({"start": 3}, "start is int; give a record, a module"),
        ({"weighting": "sizes"}, "weighting is uniform or size, not 'sizes'"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"rounds": 10**10}, "rounds must be at most 1,000,000,000"),
        ({"cohort": 0}, "the cohort must be at least 1"),
        ({"cohort": "most"}, "cohort 'most' is not a number, a fraction"),
        ({"evaluate_every": 0}, "evaluate_every must be at least 1"),
        ({"evaluate_every": (1, 2, 3)}, "evaluate_every is a number of rounds or two"),
        ({"task": "a\nb"}, "is not a name"),
    ],
    ids=without_address,
)
def test_a_value_of_the_wrong_kind_is_refused_at_once(values: Any, message: str) -> None:
    assert_refused(lambda: Experiment(**{"task": "toy", **values}), message)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "cifar11"}, "unknown task 'cifar11'; did you mean cifar10"),
        ({"algorithm": "fedxp"}, "unknown algorithm 'fedxp'; did you mean fedexp"),
        ({"mode": "papr"}, "unknown mode 'papr'; did you mean paper"),
        ({"engine": "bached"}, "engine is one of"),
        ({"cohort": [[1], [1, 2]]}, "cohort"),
        ({"cohort": {"a": 1}}, "cohort"),
        ({"cohort": True}, "cohort"),
        ({"cohort": 5}, "the cohort of 5 is larger than the federation of 2 clients"),
        ({"options": {"task.clints": 3}}, "unknown option of task toy 'task.clints'"),
        ({"options": {"task.start": "x"}}, "task.start takes 2 numbers"),
        ({"options": {"epsilon": 1}}, "unknown option of fedexp 'epsilon'; did you mean"),
        ({"options": {"eps": "abc"}}, "server.eps must be a number"),
        ({"task": fx.tasks.toy(), "options": {"task.start": 1}}, "which has no arguments"),
        ({"start": "nowhere.safetensors"}, "nowhere.safetensors"),
        ({"precision": "tf32"}, "tf32 is a mode of NVIDIA GPUs"),
        ({"device": "warp"}, "unknown device 'warp'"),
    ],
    ids=without_address,
)
def test_what_does_not_exist_or_fit_is_refused_before_training(values: Any, message: str) -> None:
    experiment = Experiment(**{"task": "toy", **values})
    assert_refused(experiment.records, message)


def test_algorithms_of_a_comparison_need_names_of_their_own() -> None:
    with pytest.raises(fx.UsageError, match="two algorithms are called 'fedexp'"):
        experiments("toy", [fx.fedexp(), fx.fedexp(eps=0.1)], 0, {})
    one, two = experiments("toy", ["fedexp", "fedavg"], 0, {"options": {"fedexp:eps": 0.5}})
    assert one.setup.options()["server.eps"] == 0.5
    assert two.spec["changed"] == []
    assert two.problem is one.problem


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


BY_HAND = """
task = "synthetic"
rounds = 6
cohort = 3
evaluate_every = [3, 2]

[set]
local.lr = 0.3
task.clients = 4
task.rows = 3
"task.dim" = "20"
eps = 0.5
server.max_step = inf
"""


def test_a_spec_that_is_written_by_hand(tmp_path: Path) -> None:
    options = {**TINY, "local.lr": 0.3, "eps": 0.5}
    expected = Experiment("synthetic", "fedexp", 0, 6, 3, evaluate_every=(3, 2), options=options)
    assert read_experiment(written(tmp_path, BY_HAND)).spec == expected.spec
    with pytest.raises(fx.UsageError, match=r"unknown option of fedexp 'local\.lrr'; did you mean"):
        _ = read_experiment(written(tmp_path, BY_HAND.replace("local.lr", "local.lrr"))).spec
    shortest = read_experiment(written(tmp_path, 'task = "toy"'))
    assert shortest.spec == Experiment("toy").spec


def test_the_stored_text_of_a_spec_can_be_edited(tmp_path: Path) -> None:
    stored = spec_text(tiny().spec)
    again = read_experiment(written(tmp_path, stored.replace("seed = 0", "seed = 1")))
    assert again.id == tiny(seed=1).id
    kept = "\n".join(line for line in stored.splitlines() if "server.beta" not in line)
    edited = kept.replace("[set]", '[set]\n"server.beta" = "0.5"')
    for stale in (stored.replace('"server.beta" = 0.9', '"server.beta" = 0.5'), edited):
        line = "options.server.beta, which does not follow from the rest; write options in its"
        assert_refused(partial(read_experiment, written(tmp_path, stale)), line)
    stale = stored.replace("dim = 20", "dim = 30")
    line = "arguments.dim, which does not follow"
    assert_refused(partial(read_experiment, written(tmp_path, stale)), line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task = ", "is not TOML"),
        ("rounds = 3", "names no task"),
        ('task = "toy"\nround = 3', "did you mean rounds"),
        ('task = "toy"\nset = 3', "is not a table of options"),
        ('task = "toy"\nrounds = "many"', "rounds"),
        ('task = "toy"\ncohort = {a = 1}', "cohort"),
        ('task = "toy"\nprivacy = 3', "privacy is 3; write a table"),
        ('task = "toy"\nprivacy = {kind = "centrl"}', "did you mean central"),
        ('task = "toy"\nprivacy = {kind = "central", clips = 1}', "did you mean clip"),
        ('task = "toy"\nprivacy = {kind = "central"}', "privacy needs clip and delta"),
        ('task = "toy"\nlocal = {lr = 1}', "local"),
        ("task = 3", "int is not a Task"),
    ],
    ids=without_address,
)
def test_a_wrong_spec_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    assert_refused(lambda: read_experiment(written(tmp_path, text)).spec, message)
    assert_refused(lambda: read_experiment(tmp_path / "nothing.toml"), "cannot read")


def test_a_stored_spec_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    whole = spec_text(tiny().spec)
    for text, message in [
        (whole.replace("rounds = 6", "rounds = 7"), "has been changed since the run began"),
        (whole.replace("format = 2", "format = 3"), "has format 3; this fedexp reads format 2"),
        (whole[: len(whole) // 2].rpartition("=")[0] + "= ", "is damaged"),
        ("format = 2\n", "has been changed"),
        (spec_text({**tiny().spec, "algorithm": 3}), "is not the spec of a run"),
        ("\x00", "is damaged"),
    ]:
        path.write_text(text)
        assert_refused(lambda: read_spec(tmp_path), message)
    path.unlink()
    assert_refused(lambda: read_spec(tmp_path), "is not a run")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "fedxp"}, "unknown algorithm 'fedxp'"),
        ({"mode": "papr"}, "unknown mode 'papr'"),
        ({"options": {"task.clints": "3"}}, "unknown option of task"),
        ({"options": {"task.clients": "x"}}, "must be a whole number"),
        ({"options": {"epsilon": "1"}}, "unknown option of fedexp"),
        ({"options": {"eps": "abc"}}, "server.eps must be a number"),
        ({"algorithm": fx.fedprox(), "options": {"mu": "abc"}}, "client.mu must be a number"),
    ],
    ids=without_address,
)
def test_a_mistake_is_found_without_data(
    values: Mapping[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @wraps(TASKS["cifar10"])
    def refuse(*arguments: Any, **more: Any) -> Task:
        raise AssertionError("no data should be read")

    monkeypatch.setitem(TASKS, "cifar10", refuse)
    check: Callable[[], object] = lambda: Experiment("cifar10", **values).resolved  # noqa: E731
    assert_refused(check, message)


def test_the_id_leaves_out_what_was_typed() -> None:
    spec = tiny().spec
    assert id_of({**spec, "set": {}, "changed": [], "task_source": "a.py:b"}) == tiny().id
