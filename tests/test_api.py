"""`fx.run` and `fx.compare`: runs are stored, resumed, and shared with the command line."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import fedexp as fx
from fedexp.cli.main import main
from fedexp.errors import UsageError
from fedexp.runs.records import read_rows
from fedexp.runs.weights import run_weights
from tests.runs.helpers import untimed

UNTYPED: Any = fx  # for calls that mypy refuses
pytestmark = pytest.mark.usefixtures("study")


def test_a_run_is_stored_and_returned_the_next_time(study: Any) -> None:
    first = fx.run(study.task, "fedexp")
    again = fx.run(study.task, "fedexp")
    assert first.folder is not None
    assert first.folder == again.folder
    assert again.outcome.stored == 4
    assert again.rows == first.rows
    assert "fedexp on mine, seed 0: 4 rounds, finished" in repr(first)


def test_an_experiment_is_run_as_it_is(study: Any) -> None:
    experiment = fx.Experiment(study.task, study.mine, 1, rounds=3, evaluate_every=(2, 1))
    first = fx.run(experiment)
    assert [row["test_accuracy"] is None for row in first.rows] == [True, False, False]
    named = fx.run("study.py:task", "study.py:mine", seed=1, rounds=3, evaluate_every=(2, 1))
    assert (named.folder, named.outcome.stored) == (first.folder, 3)
    assert [record.train_loss for record in experiment.records()][-1] == first.last["train_loss"]
    with pytest.raises(UsageError, match="an Experiment has its settings; change them by its"):
        fx.run(experiment, rounds=4)


def test_python_and_the_command_line_share_their_runs(
    study: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, algorithm in (("fedexp", "fedexp"), ("study.py:mine", study.mine)):
        assert main(["run", "study.py:task", "--algorithm", name, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        result = fx.run(study.task, algorithm)
        assert str(result.folder) == printed["folder"]
        assert result.outcome.stored == 4  # nothing was trained again


def test_progress_shows_the_goal(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("study.py")
    own = 'metrics={"calm": lambda outputs, targets: 0.25}, goal="max:test_calm",'
    path.write_text(path.read_text().replace("rounds=4,", f"rounds=4, {own}"))
    Path("calm.py").write_text(path.read_text())
    assert main(["run", "calm.py:task", "--rounds", "2", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert "  test calm 0.25  loss " in printed.out
    assert printed.err.count("test calm 0.25") == 2


def test_a_name_takes_the_tuned_values_and_an_algorithm_is_taken_as_it_is(study: Any) -> None:
    named = fx.run(study.task, "fedexp", runs=None).experiment.setup
    assert (named.options()["server.eps"], named.local.lr) == (0.01, 0.2)
    as_it_is = fx.run(study.task, fx.fedexp(eps=0.3), runs=None).experiment.setup
    assert (as_it_is.algorithm, as_it_is.local) == (fx.fedexp(eps=0.3), study.task.local)
    local = fx.LocalTraining(lr=0.5, steps=1, batch_size=None)
    assert fx.run(study.task, "fedexp", runs=None, local=local).experiment.setup.local == local
    sized = fx.run(study.task, "fedexp", runs=None, weighting="size", options={"eps": 0.5})
    assert sized.experiment.setup.weighting == "size"
    assert sized.experiment.setup.options()["server.eps"] == 0.5


def test_the_trained_model_can_be_had(study: Any) -> None:
    stored, here = fx.run(study.task, "fedexp"), fx.run(study.task, "fedexp", runs=None)
    batch = torch.tensor(study.x)
    expected = here.model()(batch)
    assert isinstance(here.model(), study.Net)
    assert here.last["test_accuracy"] == pytest.approx(
        (expected[160:].argmax(1) == torch.tensor(study.y[160:])).float().mean().item()
    )
    assert stored.folder is not None
    for model in (
        stored.model(),
        fx.load_model(stored.folder),
        fx.load_model(stored.folder, model=study.Net),
        fx.load_model(stored.folder, model=study.Net()),
    ):
        assert torch.equal(model(batch), expected)
        assert not model.training


class Centred(nn.Module):
    """Subtracts a running mean, which no state_dict has; a table is in none either."""

    mean: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * (x.detach().mean(0) + 3)
        out: torch.Tensor = self.linear(x - self.mean) * self.table
        return out


def test_trained_buffers_that_no_state_dict_has_are_stored(study: Any) -> None:
    task = fx.classification("centred", Centred, study.train, local=study.task.local, rounds=2)
    *_, record = fx.simulate(task, "fedavg", engine="loop")
    run = fx.run(task, "fedavg", engine="loop")
    assert run.folder is not None
    batch = torch.tensor(study.x)
    expected = record.model().eval()(batch)
    for model in (
        run.model(),
        fx.run(task, "fedavg", engine="loop", runs=None).model(),
        fx.load_model(run.folder),
        fx.load_model(run.folder, model=Centred),
    ):
        assert torch.equal(model(batch), expected)
    assert set(run_weights(run.folder)) == {"linear.weight", "linear.bias", "mean"}
    *_, continued = fx.simulate(task, "fedavg", start=record, engine="loop")
    for start in (record, record.model(), run.folder):
        again = fx.run(task, "fedavg", start=start, engine="loop")
        assert again.last["train_loss"] == continued.train_loss


def test_a_model_that_cannot_be_loaded_gets_one_line(study: Any, tmp_path: Path) -> None:
    stored = fx.run(study.task, "fedexp")
    assert stored.folder is not None
    with pytest.raises(UsageError, match=r"the weights do not fit Linear: Missing key"):
        fx.load_model(stored.folder, model=nn.Linear(6, 2))
    with pytest.raises(UsageError, match="is not a run"):
        fx.load_model(tmp_path / "nothing")
    (stored.folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no model yet: the run is not finished"):
        fx.load_model(stored.folder)


def test_rows_are_a_frame(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fx.run(study.task, "fedexp", runs=None)
    frame = result.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["train_loss"].tolist() == [row["train_loss"] for row in result.rows]
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert result.frame() == result.rows


def test_a_comparison_has_a_table_a_figure_and_a_report(study: Any, tmp_path: Path) -> None:
    compared = fx.compare(study.task, ["fedavg", fx.fedexp(eps=0.3), study.mine], seeds=[1, 2])
    assert [line.algorithm for line in compared.lines] == ["fedavg", "fedexp", "sign"]
    assert "final test accuracy" in compared.table()
    assert compared.table("csv").splitlines()[0].startswith("algorithm,seeds")
    frame = compared.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert set(frame["seed"]) == {1, 2}
    assert len(frame) == 3 * 2 * 4
    assert compared.plot(tmp_path / "out.png").stat().st_size > 10_000
    page = compared.report(tmp_path / "out.html").read_text()
    assert "fedexp run study.py:task --algorithm study.py:mine" in page
    assert "fedavg, fedexp, sign on mine: 6 runs" in repr(compared)


def test_a_comparison_may_have_several_targets(study: Any, tmp_path: Path) -> None:
    compared = fx.compare(study.task, ["fedavg", "fedexp"], target=[60, 0.7])
    assert (compared.target, compared.further) == (0.6, (0.7,))
    second = fx.compare(study.task, ["fedavg", "fedexp"], target=0.7).to_json()
    assert compared.to_json()["further"][0]["algorithms"] == second["algorithms"]
    assert "rounds to 60.00%  speed-up  rounds to 70.00%  speed-up" in compared.table()
    assert "reached_0.7" in compared.table("csv")
    assert "rounds to 70.00%" in compared.report(tmp_path / "out.html").read_text()
    assert fx.compare(study.task, ["fedavg"], target=[]).target == study.task.target


def test_an_accuracy_of_the_users_own_may_be_in_percent(study: Any) -> None:
    def percent(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 100.0 * (outputs.argmax(1) == targets).float().mean()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    test = {"x": study.x[160:], "y": study.y[160:]}
    made = partial(fx.supervised, "own", lambda: study.Net(4), study.train, test, rounds=3)
    own = made(loss=loss, metrics={"accuracy": percent}, goal="max:test_accuracy", target=99.5)
    assert own.target == 99.5
    assert fx.run(own, "fedavg", stop_at=100.5, runs=None).last["round"] == 3
    assert fx.compare(own, ["fedavg"], target=70, runs=None).target == 70
    assert made(target=70).target == 0.7  # the package's accuracy is a fraction


def test_workers_compute_the_same(study: Any) -> None:
    chosen = ["fedexp", study.mine]
    here = fx.compare(study.task, chosen, seeds=2, runs=None)
    there = fx.compare(study.task, chosen, seeds=2, jobs=2, runs=None)
    for one, other in zip(here.outcomes, there.outcomes, strict=True):
        assert untimed(one.rows) == untimed(other.rows)


def test_options_are_for_all_or_for_one(study: Any) -> None:
    compared = fx.compare(
        study.task,
        ["fedavg", "fedexp"],
        runs=None,
        rounds=2,
        options={"local.lr": 0.3, "fedexp:eps": 0.7},
    )
    setups = {each.names.algorithm: each.setup for each in compared.experiments}
    assert [setup.local.lr for setup in setups.values()] == [0.3, 0.3]
    assert setups["fedexp"].options()["server.eps"] == 0.7
    same = {"fedexp:eps": 1e9, "fedavg:lr": 1, "fedexp:average_last": 1}  # FedExP is FedAvg then
    fedavg, fedexp = fx.compare(study.task, ["fedavg", "fedexp"], runs=None, options=same).lines
    assert fedavg.finals == fedexp.finals
    with pytest.raises(UsageError, match="unknown algorithm in option fedxp:eps"):
        fx.compare(study.task, ["fedexp"], runs=None, options={"fedxp:eps": 1})
    with pytest.raises(UsageError, match="unknown option of fedexp 'epps'; did you mean eps"):
        fx.compare(study.task, ["fedexp"], runs=None, options={"epps": 1})


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda s: fx.run("digts"), "unknown task 'digts'; did you mean digits"),
        (
            lambda s: fx.run(s.task, cast(Any, fx.fedavg)),
            "fedavg is not an Algorithm until it is called",
        ),
        (lambda s: fx.run(s.task, "fedxp"), "unknown algorithm 'fedxp'; did you mean fedexp"),
        (lambda s: fx.run(s.train), "Federation is not a Task"),
        (lambda s: fx.compare(s.task, []), "needs at least one algorithm"),
        (lambda s: fx.compare(s.task, ["fedavg"] * 2, runs=None), "two algorithms are called"),
        (lambda s: fx.run(s.task, "fedexp", rounds=0), "rounds must be at least 1"),
        (lambda s: fx.run(s.task, "fedexp", rounds=10**30), "rounds must be at most 1,000,000,000"),
        (lambda s: UNTYPED.run(s.task, "fedexp", runs=3), "runs is 3; name a folder"),
        (lambda s: UNTYPED.run(s.task, "fedexp", on_round=3), "on_round is 3; give a function"),
        (lambda s: fx.compare(s.task, checkpoint_every=-1), "checkpoint_every is a number of"),
        (lambda s: UNTYPED.run(s.task, round=3), "unknown argument 'round'; did you mean rounds"),
        (
            lambda s: UNTYPED.compare(s.task, cohrt=3),
            "unknown argument 'cohrt'; did you mean cohort",
        ),
        (lambda s: fx.compare(s.task, "fedavg"), "a list of algorithms, e.g. ['fedavg', 'fedexp']"),
        (lambda s: UNTYPED.compare(s.task, seeds=1.5), "seeds must be a whole number: 1.5"),
        (lambda s: UNTYPED.compare(s.task, seeds=[0.2, 1]), "a seed must be a whole number: 0.2"),
        (lambda s: UNTYPED.compare(s.task, seeds="12"), "a seed must be a whole number: '1'"),
        (lambda s: fx.compare(s.task, seeds=[0, 1, 0]), "a seed is given twice: [0, 1, 0]"),
        (lambda s: fx.run(s.task, s.mine, mode="recommended"), "has no effect on an Algorithm"),
        (
            lambda s: fx.compare(s.task, [s.mine, "study.py:mine"], mode="authors-code"),
            "mode 'authors-code' has no effect on an Algorithm",
        ),
        (lambda s: UNTYPED.compare(s.task, jobs="2"), "jobs must be a whole number: '2'"),
        (lambda s: UNTYPED.compare(s.task, jobs=0), "jobs must be at least 1, not 0"),
        (lambda s: UNTYPED.compare(s.task, target="a"), "target must be a finite number, not 'a'"),
        (lambda s: fx.run("study.py"), "study.py is a file; name a task in it, e.g. study.py:task"),
        (lambda s: fx.save_state(s.task, "s"), "save_state takes record.state, not Task"),
        (
            lambda s: UNTYPED.run(s.task, local={"lr": 1}),
            "local is dict; give fedexp.LocalTraining",
        ),
        (lambda s: UNTYPED.run(s.task, options=["eps"]), "options is list; give values by name"),
        (lambda s: UNTYPED.run(s.task, privacy=8), "privacy is int; give fedexp.privacy.Central"),
        (
            lambda s: UNTYPED.run(s.task, cohort=["a"]),
            "the cohort must be a list of client numbers",
        ),
        (lambda s: fx.Algorithm("a", server=cast(Any, fx.ExP)), "is ExP, not a fedexp.ServerRule;"),
        (lambda s: fx.Algorithm("a", client=cast(Any, fx.ExP())), "not a fedexp.ClientRule; give"),
    ],
)
def test_mistakes_get_one_line_that_names_the_remedy(study: Any, call: Any, line: str) -> None:
    with pytest.raises(UsageError) as raised:
        call(study)
    assert line in str(raised.value)


def test_a_state_can_be_saved_and_continued(study: Any, tmp_path: Path) -> None:
    whole = list(fx.simulate(study.task, fx.scaffold(), rounds=4, cohort=3))
    fx.save_state(whole[1].state, tmp_path / "state.safetensors")
    with pytest.raises(UsageError, match="is a file; name the folder of a run, or use load_state"):
        fx.load_model(tmp_path / "state.safetensors")
    with pytest.raises(UsageError, match=r"cannot write .*; choose another path"):
        fx.save_state(whole[1].state, tmp_path / "state.safetensors" / "below")
    state = fx.load_state(tmp_path / "state.safetensors")
    rest = list(fx.simulate(study.task, fx.scaffold(), rounds=4, cohort=3, start=state))
    assert [record.train_loss for record in rest] == [r.train_loss for r in whole[2:]]
    assert torch.equal(rest[-1].state.params, whole[-1].state.params)
    (tmp_path / "other").write_text("no")
    with pytest.raises(UsageError, match="is not a state"):
        fx.load_state(tmp_path / "other")


def test_a_run_can_be_given_more_rounds(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = (
        fx.run(study.task, "fedexp"),
        fx.run(study.task, "fedexp", rounds=6, runs="whole"),
    )
    assert short.folder is not None
    assert whole.folder is not None
    assert main(["resume", str(short.folder), "--rounds", "6", "--json"]) == 0
    longer = Path(json.loads(capsys.readouterr().out)["folder"])
    assert longer.name == whole.folder.name
    assert untimed(read_rows(longer)) == untimed(read_rows(whole.folder))
    assert (longer / "model.safetensors").read_bytes() == (
        whole.folder / "model.safetensors"
    ).read_bytes()
    assert untimed(read_rows(short.folder)) == untimed(short.rows)
    assert fx.run(study.task, "fedexp", rounds=6).outcome.stored == 6
    assert main(["resume", str(short.folder), "--rounds", "4"]) == 2
    assert "has 4 rounds; give --rounds a larger number" in capsys.readouterr().err
    stored = short.folder / "fingerprint.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"numerics": 0}))
    others = sorted(path.name for path in short.folder.parent.iterdir())
    assert main(["resume", str(short.folder), "--rounds", "7"]) == 2
    line = capsys.readouterr().err
    assert f"{short.folder} holds a run of other content: " in line
    assert "start a new run with --rounds 7" in line
    assert sorted(path.name for path in short.folder.parent.iterdir()) == others
    stateful = fx.run(study.task, "scaffold")
    assert main(["resume", str(stateful.folder), "--rounds", "6"]) == 2
    assert "client state of scaffold is removed then; start a new run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"local.lr_schedule": "cosine"}, "local.lr_schedule 'cosine' depends on the number"),
        ({"server_schedule": "linear"}, "server_schedule 'linear' depends on the number of rounds"),
        (
            {"local.step_schedule": "cosine", "local.step_schedule_over": "run"},
            "local.step_schedule_over 'run' depends on the number of rounds",
        ),
        (
            {"local.momentum": 0.9, "local.keep_state": True},
            "is finished, and the client state of fedavg is removed then",
        ),
    ],
    ids=["lr_schedule", "server_schedule", "step_schedule", "keep_state"],
)
def test_a_run_has_more_rounds_only_with_the_same_first_ones(
    study: Any, capsys: pytest.CaptureFixture[str], options: dict[str, Any], reason: str
) -> None:
    stored = fx.run(study.task, "fedavg", options=options)
    assert main(["resume", str(stored.folder), "--rounds", "6"]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
def test_a_private_run_has_more_rounds_only_with_the_same_noise(
    study: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedexp.privacy import CentralPrivacy

    by_epsilon = CentralPrivacy(clip=1.0, delta=1e-5, epsilon=20.0)
    stored = fx.run(study.task, "fedavg", privacy=by_epsilon)
    assert main(["resume", str(stored.folder), "--rounds", "6"]) == 2
    assert "computed for epsilon over 4 rounds" in capsys.readouterr().err
    fixed = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
    short = fx.run(study.task, "fedavg", privacy=fixed)
    assert main(["resume", str(short.folder), "--rounds", "6"]) == 0
    whole = fx.run(study.task, "fedavg", privacy=fixed, rounds=6, runs="whole")
    longer = fx.run(study.task, "fedavg", privacy=fixed, rounds=6)
    assert longer.outcome.stored == 6
    assert untimed(longer.rows) == untimed(whole.rows)


def test_a_run_starts_from_the_weights_of_another(study: Any) -> None:
    first = fx.run(study.task, "fedavg")
    model = first.model()
    straight = list(fx.simulate(study.task, fx.fedexp(eps=0.1), start=model))
    for start in (model, model.state_dict(), first.folder):
        warm = fx.run(study.task, fx.fedexp(eps=0.1), start=start, runs="warm")
        assert [row["train_loss"] for row in warm.rows] == [r.train_loss for r in straight]
    assert first.last["train_loss"] > straight[0].train_loss
    assert len(list(Path("warm").glob("mine-*"))) == 1  # the same weights are the same run
    assert len(list(Path("warm/starts").iterdir())) == 1
    cold = fx.run(study.task, fx.fedexp(eps=0.1), runs="warm")
    assert cold.folder != warm.folder
    assert main(["resume", str(warm.folder), "--restart"]) == 0
    with pytest.raises(UsageError, match="there are no weights in"):
        fx.run(study.task, "fedexp", start="nothing")


def choose(rng: Any, round: int, federation: fx.Federation) -> list[int]:
    """Return two clients, in turn."""
    return [(2 * round + k) % federation.clients for k in range(2)]


@pytest.mark.parametrize("cohort", [1, 3, 0.5, 1.0, "all", [0, 5], choose])
def test_cohorts_of_every_kind_are_stored_and_resumed(study: Any, cohort: Any) -> None:
    expected = [r.train_loss for r in fx.simulate(study.task, "fedexp", cohort=cohort)]
    stored = fx.run(study.task, "fedexp", cohort=cohort)
    assert [row["train_loss"] for row in stored.rows] == expected
    assert main(["resume", str(stored.folder), "--restart"]) == 0
    again = fx.run(study.task, "fedexp", cohort=cohort)
    assert again.folder == stored.folder
    assert untimed(again.rows) == untimed(stored.rows)


@pytest.mark.parametrize("cohort", [[1.5, 2.5], ["a"], {1, 2}, True])
def test_cohorts_that_are_none_are_refused_as_in_simulate(study: Any, cohort: Any) -> None:
    for call in (fx.simulate, partial(fx.run, runs=None)):
        with pytest.raises(UsageError, match="the cohort"):
            call(study.task, "fedexp", cohort=cohort)


def test_numbers_of_numpy_are_numbers(study: Any) -> None:
    given = fx.run(study.task, fx.fedexp(eps=np.float64(0.5)), stop_at=cast(Any, np.float32(0.99)))
    named = fx.run(study.task, "fedexp", options={"eps": np.float32(0.5), "local.lr": 0.1})
    assert given.experiment.setup.options()["server.eps"] == 0.5
    assert named.experiment.setup.options()["server.eps"] == 0.5
    seeds = fx.compare(study.task, ["fedavg"], seeds=cast(Any, np.int64(2)))
    assert [outcome.seed for outcome in seeds.outcomes] == [0, 1]
    one = fx.compare(study.task, ["fedavg"], seeds=cast(Any, np.array([1])))
    assert one.outcomes[0].stored == 4


def test_none_is_the_default_of_every_setting(study: Any) -> None:
    unset = {"engine": None, "mode": None, "deterministic": None, "by_client": None}
    given = fx.run(study.task, runs=None, rounds=1, **cast(Any, unset))
    assert given.experiment.spec == fx.run(study.task, runs=None, rounds=1).experiment.spec


def test_none_is_the_tasks_own_everywhere(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    records = list(fx.simulate(study.task, "fedexp"))
    assert len(records) == 4
    assert {record.clients for record in records} == {3}
    assert main(["run", "study.py:task", "--algorithm", "fedexp", "--json"]) == 0
    final = json.loads(capsys.readouterr().out)["final"]
    assert final["train_loss"] == records[-1].train_loss
    assert final["test_accuracy"] == records[-1].test_accuracy
    everyone = next(iter(fx.simulate(study.task, "fedexp", cohort="all")))
    assert everyone.clients == study.train.clients


@pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
def test_privacy_is_part_of_a_stored_run(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from fedexp.privacy import CentralPrivacy

    privacy = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
    records = list(fx.simulate(study.task, "fedexp", privacy=privacy))
    stored = fx.run(study.task, "fedexp", privacy=privacy)
    assert stored.last["epsilon"] == records[-1].metrics["epsilon"] > 0
    assert stored.last["train_loss"] == records[-1].train_loss
    text = "central:clip=1,delta=1e-5,noise_multiplier=1"
    command = ["run", "study.py:task", "--algorithm", "fedexp", "--privacy", text, "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(stored.folder)
    assert main(["resume", str(stored.folder), "--restart"]) == 0
    assert main([*command[:5], "centrl:clip=1"]) == 2
    assert "did you mean central" in capsys.readouterr().err


def test_every_client_is_evaluated_where_asked_for(study: Any) -> None:
    result = fx.run(study.task, "fedexp", by_client=True, runs=None)
    last = result.last
    assert last["train_accuracy_worst_decile"] <= last["train_accuracy"]
    assert "train_accuracy_worst_decile" not in fx.run(study.task, "fedexp", runs=None).last
