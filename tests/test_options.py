"""Options by name, the paper's values, and the mode of the released code."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

import fedexp as fx
from fedexp.algorithms import ALGORITHMS, RECOMMENDED_EPS
from fedexp.errors import DataNote
from fedexp.experiment import Experiment, experiments
from fedexp.local import LocalTraining
from fedexp.modes import MODES
from fedexp.options import Setup, share_options
from fedexp.text import convert, parse_assignments
from tests.helpers.problems import classes_task


def setup_of(task: Any, name: str = "fedexp", **settings: Any) -> Setup:
    return Experiment(task, name, **settings).setup


def setup(name: str = "fedexp", mode: str = "paper") -> Setup:
    return setup_of(fx.tasks.synthetic(clients=2, rows=2, dim=5), name, mode=mode)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_names_are_those_of_the_algorithms(name: str) -> None:
    assert ALGORITHMS[name]().name == name


def test_bare_names_find_the_server_first() -> None:
    changed = setup("fedprox").with_options({"lr": "3", "mu": "0.5", "steps": "7"})
    assert changed.algorithm.server == fx.Average(3.0)
    assert changed.algorithm.client == fx.Prox(0.5)
    assert changed.local.steps == 7
    assert changed.with_options({"local.lr": "0.7"}).local.lr == 0.7


@dataclass(frozen=True)
class Regularised(fx.Prox):
    """A client rule with a field that `DynamicAverage` has as well."""

    alpha: float = 0.1


@dataclass(frozen=True)
class DynamicAverage(fx.Average):
    alpha: float = 0.1


FEDDYN = fx.Algorithm("feddyn", client=Regularised(), server=DynamicAverage())


@pytest.mark.parametrize("others", [{}, {"fedavg": setup("fedavg")}])
def test_a_name_that_client_and_server_share_is_refused(others: dict[str, Setup]) -> None:
    both = Setup(FEDDYN, LocalTraining())
    line = r"^feddyn has server\.alpha and client\.alpha; write which one instead of alpha$"
    with pytest.raises(fx.UsageError, match=line):
        both.with_options({"alpha": "0.5"})
    for key in ("alpha", "feddyn:alpha"):
        with pytest.raises(fx.UsageError, match=line):
            share_options({**others, "feddyn": both}, {key: "0.5"})
    with pytest.raises(fx.UsageError, match=line):
        _ = Experiment(classes_task(), FEDDYN, options={"alpha": 0.5}).resolved
    changed = both.with_options({"client.alpha": "0.5", "server.alpha": "0.7"})
    assert changed.options()["client.alpha"] == 0.5
    assert changed.options()["server.alpha"] == 0.7


def test_a_name_that_server_and_local_training_share_is_refused() -> None:
    with pytest.raises(fx.UsageError, match=r"has server\.decay_.* and local\.decay_"):
        setup().with_options({"decay_before_first_round": "true"})


@pytest.mark.filterwarnings("error")
def test_a_comparison_notes_where_an_option_has_no_effect() -> None:
    setups = {name: setup(name) for name in ("fedavg", "fedexp", "scaffold", "fedexp-m")}
    line = "^option lr is server.lr of fedavg, scaffold; it has no effect on fedexp, fedexp-m$"
    with pytest.warns(DataNote, match=line):
        shared = share_options(setups, {"lr": "0.5"})
    assert shared == {
        "fedavg": {"lr": "0.5"},
        "scaffold": {"lr": "0.5"},
        "fedexp": {},
        "fedexp-m": {},
    }
    share_options(setups, {"fedavg:lr": "0.5", "local.lr": "0.1", "steps": "3"})


@pytest.mark.parametrize("key", ["fedexp:steps", "fedexp:local.steps"])
def test_steps_of_one_algorithm_replace_the_epochs_of_all(key: str) -> None:
    setups = {name: setup(name) for name in ("fedavg", "fedexp")}
    for general in ("epochs", "local.epochs"):
        shared = share_options(setups, {general: "1", key: "5"})
        trained = {name: setups[name].with_options(of_it).local for name, of_it in shared.items()}
        assert trained["fedexp"] == replace(setups["fedexp"].local, steps=5, epochs=None)
        assert trained["fedavg"] == replace(setups["fedavg"].local, steps=None, epochs=1)
    shared = share_options(setups, {"steps": "5", "fedexp:epochs": "none"})
    assert setups["fedexp"].with_options(shared["fedexp"]).local.steps == 5
    for both in ({"epochs": "1", "steps": "5"}, {"fedavg:epochs": "1", "fedavg:steps": "5"}):
        with pytest.raises(fx.UsageError, match=r"^fedavg: local\.steps=5 and local\.epochs=1 "):
            share_options(setups, both)


def test_every_option_can_be_set_to_its_own_value() -> None:
    for name in ALGORITHMS:
        one = setup(name)
        assert one.with_options(one.options()).options() == one.options()


def test_an_option_that_is_not_used_is_in_no_spec_and_found_by_its_name() -> None:
    one = setup("diloco")
    assert one.options()["server.nesterov"] is True
    changed = one.with_options({"server.nesterov": "false", "warmup_steps": "3"})
    assert "server.nesterov" not in changed.options()
    assert changed.changes_from(one) == {"server.nesterov": "False", "local.warmup_steps": "3"}
    assert one.with_options(changed.changes_from(one)) == changed
    with pytest.raises(fx.UsageError, match=r"server\.nesterov and local\.nesterov; write which"):
        one.with_options({"nesterov": "true"})
    plain = Experiment("toy", "diloco", options={"server.nesterov": False})
    assert plain.spec["set"] == {"server.nesterov": "False"}
    assert Experiment.of(plain.spec).setup.algorithm.server == fx.Momentum(0.7, 0.9)


def test_options_are_checked_together() -> None:
    bounds = {"low": "6", "lr": "8", "high": "10"}  # each of the first two is refused alone
    changed = setup("fedhyper").with_options(bounds)
    assert changed.algorithm.server == fx.Hypergradient(8.0, 6.0, 10.0)
    setups = {name: setup(name) for name in ("fedavg", "fedhyper")}
    with pytest.warns(DataNote, match="of fedhyper; it has no effect on fedavg"):
        shared = share_options(setups, bounds)
    assert shared == {"fedavg": {"lr": "8"}, "fedhyper": bounds}
    with pytest.raises(fx.UsageError, match=r"lr = 8.0, outside the bounds"):
        setup("fedhyper").with_options({"lr": "8"})


def test_steps_replace_epochs_and_epochs_steps() -> None:
    one = Setup(fx.fedavg(), LocalTraining(epochs=2))
    assert one.with_options({"steps": "7"}).local == LocalTraining(steps=7)
    assert one.with_options({"steps": "7", "epochs": "none"}).local == LocalTraining(steps=7)
    assert one.with_options({"epochs": "none"}).local == LocalTraining(steps=20)
    assert one.with_options({"steps": "none"}) == one
    assert setup().with_options({"steps": "7"}).local.steps == 7
    assert setup().with_options({"epochs": "3"}).local.steps is None
    with pytest.raises(fx.UsageError, match=r"local\.steps=7 and local\.epochs=1 exclude"):
        one.with_options({"steps": 7, "local.epochs": 1})


def test_plain_options() -> None:
    changed = setup().with_options({"average_last": "5", "weighting": "size"})
    assert (changed.algorithm.iterates, changed.weighting) == (5, "size")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("esp", "1", "did you mean eps"),
        ("server.mu", "1", "unknown option of fedexp 'server.mu'"),
        ("eps", "abc", "server.eps must be a number"),
        ("eps", "-1", "eps must not be negative"),
        ("steps", "1.5", "local.steps must be a whole number"),
        ("clamp", "maybe", "server.clamp must be true or false"),
        ("eps_mode", "x", "server.eps_mode must be one of absolute"),
        ("weighting", "x", "weighting must be one of uniform, size"),
        ("average_last", "0", "average_last must be at least 1"),
    ],
)
def test_wrong_options_get_a_clear_line(key: str, value: str, message: str) -> None:
    with pytest.raises(fx.UsageError, match=message):
        setup().with_options({key: value})


def test_assignments() -> None:
    assert parse_assignments(["a=1", "b.c=x=y"]) == {"a": "1", "b.c": "x=y"}
    with pytest.raises(fx.UsageError, match="key=value"):
        parse_assignments(["eps"])


def test_values() -> None:
    assert convert("inf", float, "x") == math.inf
    assert convert("1e3", int, "x") == 1000
    assert convert("1,2", tuple[float, float], "x") == (1.0, 2.0)
    assert convert(True, bool, "x") is True
    assert convert("a", Literal["a", "b"], "x") == "a"
    with pytest.raises(fx.UsageError, match="2 numbers"):
        convert("1", tuple[float, float], "x")
    with pytest.raises(fx.UsageError, match="must be a number"):
        convert("nan", float, "x")


def test_the_papers_values_are_the_defaults() -> None:
    assert setup("fedavg").algorithm.server == fx.Average(10.0)
    assert setup("fedexp").algorithm.server == fx.ExP(eps=0.0)
    assert setup("fedadagrad").algorithm.server == fx.Adagrad(lr=0.1)
    assert setup("scaffold").local.lr == 0.1


def test_authors_code_turns_every_deviation_on() -> None:
    task = classes_task()
    local = fx.LocalTraining(lr=0.1, lr_decay=0.998)
    task = type(task)(**{**vars(task), "local": local})
    one = MODES["authors-code"](task, fx.fedexp(eps=0.1))
    server = one.algorithm.server
    assert server == fx.ExP(
        eps=0.1,
        eps_mode="participants",  # B1
        eps_decay=0.998**2,  # B2
        decay_before_first_round=True,  # B3
    )
    assert one.local.decay_before_first_round  # B3
    assert one.weighting == "size"  # B5
    momentum = setup_of(task, "fedexp-m", mode="authors-code").algorithm.server
    assert isinstance(momentum, fx.MomentumExP)
    assert not momentum.apply_momentum  # B6
    adagrad = setup_of(task, "fedadagrad", mode="authors-code").algorithm.server
    assert adagrad == fx.Adagrad(0.1, tau=0.01, form="authors")  # B8
    adam = setup_of(task, "fedadam", mode="authors-code").algorithm.server
    assert adam == fx.Adam(0.01, tau=1e-4, form="authors")  # B9


def test_authors_code_follows_the_notebook_on_synthetic() -> None:
    one = setup("fedexp", "authors-code")
    assert isinstance(one.algorithm.server, fx.ExP)
    assert not one.algorithm.server.clamp  # B26
    assert one.algorithm.iterates == 1  # B25
    assert setup("fedadagrad", "authors-code").algorithm.server.tau == 0.0  # type: ignore[attr-defined]


def test_recommended_is_fedexp_with_a_relative_eps_and_the_papers_client_step() -> None:
    task = fx.tasks.digits()
    paper, own = setup_of(task), setup_of(task, mode="recommended")
    assert own.algorithm.server == fx.ExP(RECOMMENDED_EPS, eps_mode="relative")
    assert own.local == paper.local
    for name in ("fedavg", "scaffold", "scaffold-exp", "fedprox-exp", "fedexp-m"):
        assert setup_of(task, name, mode="recommended") == setup_of(task, name)


EPS_CASES: list[tuple[str, dict[str, Any], tuple[float, str], tuple[float, str]]] = [
    # mode, options, on a task without tuned values, on digits, whose eps is 0.1
    ("paper", {}, (0.05, "relative"), (0.1, "absolute")),
    ("paper", {"eps": 0.2}, (0.2, "absolute"), (0.2, "absolute")),
    ("paper", {"server.eps": 0.05}, (0.05, "absolute"), (0.05, "absolute")),
    ("paper", {"eps_mode": "relative"}, (0.05, "relative"), (0.05, "relative")),
    ("paper", {"eps_mode": "absolute"}, (0.001, "absolute"), (0.1, "absolute")),
    ("paper", {"eps_mode": "participants"}, (0.001, "participants"), (0.1, "participants")),
    ("paper", {"eps": 0.2, "eps_mode": "relative"}, (0.2, "relative"), (0.2, "relative")),
    ("recommended", {}, (0.05, "relative"), (0.05, "relative")),
    ("recommended", {"eps": 0.2}, (0.2, "relative"), (0.2, "relative")),
    ("recommended", {"eps_mode": "absolute"}, (0.001, "absolute"), (0.001, "absolute")),
    ("authors-code", {}, (0.001, "participants"), (0.1, "participants")),
    ("authors-code", {"eps": 0.2}, (0.2, "participants"), (0.2, "participants")),
]


@pytest.mark.parametrize(("mode", "options", "untuned", "tuned"), EPS_CASES)
def test_an_eps_has_the_form_of_the_mode_and_never_another_unit(
    mode: str, options: dict[str, Any], untuned: tuple[float, str], tuned: tuple[float, str]
) -> None:
    for task, expected in ((classes_task(), untuned), (fx.tasks.digits(), tuned)):
        server = setup_of(task, mode=mode, options=options).algorithm.server
        assert isinstance(server, fx.ExP)
        assert (server.eps, server.eps_mode) == expected


@pytest.mark.parametrize("eps", [None, 0.0, 0.001, 0.05, 0.1])
@pytest.mark.parametrize("eps_mode", [None, "absolute", "participants", "relative"])
@pytest.mark.parametrize("mode", ["paper", "recommended", "authors-code"])
def test_an_algorithm_is_run_with_the_eps_it_has(eps: Any, eps_mode: Any, mode: str) -> None:
    algorithm = fx.fedexp(eps, eps_mode)
    for task in (classes_task(), "digits", "toy"):
        experiment = Experiment(task, algorithm, mode=mode)
        assert experiment.setup.algorithm.server == algorithm.server
        changed = experiment.with_options({"eps": 0.2})
        server = changed.setup.algorithm.server
        assert isinstance(server, fx.ExP)
        assert (server.eps, server.eps_mode) == (0.2, algorithm.server.eps_mode)  # type: ignore[attr-defined]
        (compared,) = experiments(task, [algorithm], 0, {"mode": mode, "options": {"eps": 0.2}})
        assert compared.setup.algorithm.server == changed.setup.algorithm.server


def test_an_eps_mode_without_an_eps_keeps_eps_0() -> None:
    assert setup("fedexp", "paper").with_options({"eps_mode": "relative"}).algorithm.server == (
        fx.ExP(eps=0.0, eps_mode="relative")
    )


def test_a_rule_of_the_users_own_keeps_its_form() -> None:
    own = Setup(fx.Algorithm("mine", server=fx.ExP(0.05, eps_mode="relative")), LocalTraining())
    assert own.with_options({"eps": 0.1}).algorithm.server == fx.ExP(0.1, eps_mode="relative")


def test_recommended_keeps_eps_0_where_clients_can_fit_one_model() -> None:
    own = setup("fedexp", "recommended")
    assert own.algorithm.server == fx.ExP(eps=0.0, eps_mode="relative")
    assert own.local == setup("fedexp", "paper").local
    assert setup_of("toy", mode="recommended").algorithm.server == fx.ExP(
        eps=0.0, factor=1.0, eps_mode="relative"
    )


def test_an_unknown_mode() -> None:
    with pytest.raises(fx.UsageError, match="unknown mode 'papers'; did you mean paper"):
        setup(mode="papers")
