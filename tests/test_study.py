"""`fx.run`, `fx.compare` and `fx.tune`: any task and algorithm, stored, resumed, in workers."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
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
from fedexp.errors import DataNote, UsageError
from fedexp.references import load_object
from fedexp.runs.files import read_rows
from fedexp.runs.folder import RunWarning, rerun
from fedexp.runs.spec import read_spec
from fedexp.runs.weights import run_weights
from fedexp.tasks.metrics import as_metrics
from tests.helpers.own_study import write_study
from tests.runs.helpers import untimed

UNTYPED: Any = fx  # for calls that mypy refuses


@pytest.fixture(autouse=True)
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The objects of a user's file, imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDEXP_RUNS", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_study(tmp_path)
    load_object("study.py:task")
    yield sys.modules["study"]
    sys.modules.pop("study", None)


def test_a_run_is_stored_and_returned_the_next_time(study: Any) -> None:
    first = fx.run(study.task, "fedexp")
    again = fx.run(study.task, "fedexp")
    assert first.folder is not None
    assert first.folder == again.folder
    assert again.outcome.stored == 4
    assert again.rows == first.rows
    assert "fedexp on mine, seed 0: 4 rounds, finished" in repr(first)


def test_python_and_the_command_line_share_their_runs(
    study: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, own in (("fedexp", "fedexp"), ("study.py:mine", study.mine)):
        assert main(["run", "study.py:task", "--algorithm", name, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        result = fx.run(study.task, own)
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
    named = fx.run(study.task, "fedexp", runs=None).run.setup
    assert (named.options()["server.eps"], named.local.lr) == (0.01, 0.2)
    given = fx.run(study.task, fx.fedexp(eps=0.3), runs=None).run.setup
    assert (given.algorithm, given.local) == (fx.fedexp(eps=0.3), study.task.local)
    local = fx.LocalTraining(lr=0.5, steps=1, batch_size=None)
    assert fx.run(study.task, "fedexp", runs=None, local=local).run.setup.local == local
    sized = fx.run(study.task, "fedexp", runs=None, weighting="size", options={"eps": 0.5})
    assert sized.run.setup.weighting == "size"
    assert sized.run.setup.options()["server.eps"] == 0.5


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
    compared = fx.compare(study.task, ["fedavg"], target=[60, 0.7])
    assert (compared.target, compared.further) == (0.6, (0.7,))
    assert "rounds to 60.00%  speed-up  rounds to 70.00%  speed-up" in compared.table()
    assert "reached_0.7" in compared.table("csv")
    assert "rounds to 70.00%" in compared.report(tmp_path / "out.html").read_text()
    assert fx.compare(study.task, ["fedavg"], target=[]).target == study.task.target


def test_a_search_without_a_score_has_no_best(study: Any) -> None:
    own = as_metrics({"never": lambda outputs, targets: math.inf})
    task = replace(study.task, metrics=own, metric="test_never", higher=True)
    with pytest.warns(DataNote, match="test_never is infinite"):
        found = fx.tune(task, "fedavg", {"local.lr": [0.1, 0.2]}, rounds=3, store="none.db")
    with pytest.raises(fx.UsageError, match="no trial has a finite test_never, so none is the"):
        found.best  # noqa: B018


def test_a_search_keeps_the_unit_of_the_eps(study: Any) -> None:
    found = fx.tune(study.task, fx.fedexp(), {"eps": [0.2]}, rounds=3, store="unit.db")
    (best,) = found.trials
    again = fx.run(study.task, fx.fedexp(), options=found.best, rounds=3, runs=None)
    assert again.run.setup.options()["server.eps_mode"] == "relative"
    assert best.result.score == pytest.approx(np.mean([r["train_accuracy"] for r in again.rows]))
    trial = found.study.spec_at(best.point).prepare(found.study.run.task)
    assert trial.setup == again.run.setup
    by_name = fx.tune(study.task, "fedexp", {"eps": [0.2]}, rounds=3, store="name.db").study
    assert by_name.spec_at({"server.eps": 0.2}).prepare().setup.options()["server.eps_mode"] == (
        "absolute"
    )


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


def test_what_cannot_be_imported_runs_in_this_process(study: Any) -> None:
    inline = fx.Algorithm("inline", server=study.SignAverage(0.02))
    with pytest.warns(RunWarning, match="algorithm 'inline' was made in this session"):
        compared = fx.compare(study.task, ["fedavg", inline], seeds=2, jobs=2, runs=None)
    assert [line.algorithm for line in compared.lines] == ["fedavg", "inline"]
    cyclic = fx.cohorts.cyclic(2)
    with pytest.warns(RunWarning, match="a function among the options was made in this session"):
        fx.compare(study.task, ["fedavg", "fedexp"], jobs=2, runs=None, rounds=2, cohort=cyclic)
    with pytest.warns(RunWarning, match="task 'mine' was made in this session"):
        fx.compare(study.make(), ["fedavg"], seeds=2, jobs=2, runs=None)


def test_data_that_differ_in_every_process_are_refused(tmp_path: Path) -> None:
    path = write_study(tmp_path, name="unseeded.py")
    path.write_text(path.read_text().replace("default_rng(0)", "default_rng()"))
    own = load_object("unseeded.py:task")
    with pytest.raises(UsageError, match=r"unseeded.py:task has other data in every process"):
        fx.compare(own, ["fedavg"], seeds=2, jobs=2, runs=None)


SCRIPT = """
import warnings
import fedexp as fx
import torch.nn.functional as F
from study import make

ALPHA = 1.0


def loss(output, y):
    return ALPHA * F.cross_entropy(output, y, reduction="none")


task = fx.supervised("own", make().objective.build, make().train, loss=loss, rounds=2)
mine = fx.Algorithm("mine", server=fx.Average(1.0))
if __name__ == "__main__":
    {change}
    found = []
    for jobs in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            done = fx.compare(task, [mine], seeds=2, jobs=jobs, runs=None)
        found.append([outcome.rows[-1]["train_loss"] for outcome in done.outcomes])
    assert found[0] == found[1], found
    print([str(each.message) for each in caught])
"""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("ALPHA = 100.0", "script.py:task"),
        ('mine = fx.Algorithm("mine", server=fx.Average(0.5))', "script.py:mine"),
        ("pass", None),
    ],
)
def test_workers_train_what_the_script_has_changed_or_nothing(
    change: str, named: str | None, tmp_path: Path
) -> None:
    """Workers import the file, where nothing under `if __name__ == "__main__":` has run."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("{change}", change))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if named is None:
        assert done.stdout == "[]\n"
    else:
        assert f"{named} is another one in processes that import it" in done.stdout


def test_a_search_over_a_grid_of_ones_own(study: Any, tmp_path: Path) -> None:
    grid = {"lr": [0.001, 0.05], "factor": [0.5, 1.0]}
    tuned = fx.tune(study.task, study.mine, grid, rounds=3, store="own.db")
    assert len(tuned.trials) == 4
    assert tuned.best.keys() == {"server.lr", "client.factor"}
    assert tuned.score == max(trial.result.score for trial in tuned.trials)
    assert tuned.table().splitlines()[2].split()[0] == "sign"
    assert isinstance(tuned.frame(), pandas.DataFrame)
    assert tuned.plot(tmp_path / "tune.png").exists()
    with pytest.raises(UsageError, match="takes numbers; set 'adam' with options="):
        fx.tune(study.task, "fedavg", {"local.optimizer": cast(Any, ["adam"])})
    best = fx.run(study.task, study.mine, options=tuned.best, runs=None)
    assert best.run.setup.options()["server.lr"] == tuned.best["server.lr"]
    before = (tmp_path / "own.db").stat().st_mtime_ns
    assert fx.tune(study.task, study.mine, grid, rounds=3, store="own.db").best == tuned.best
    assert (tmp_path / "own.db").stat().st_mtime_ns == before  # no trial was run again


def test_options_are_for_all_or_for_one(study: Any) -> None:
    compared = fx.compare(
        study.task,
        ["fedavg", "fedexp"],
        runs=None,
        rounds=2,
        options={"local.lr": 0.3, "fedexp:eps": 0.7},
    )
    setups = {run.spec.algorithm: run.setup for run in compared.runs}
    assert [setup.local.lr for setup in setups.values()] == [0.3, 0.3]
    assert setups["fedexp"].options()["server.eps"] == 0.7
    with pytest.raises(UsageError, match="unknown algorithm in option fedxp:eps"):
        fx.compare(study.task, ["fedexp"], runs=None, options={"fedxp:eps": 1})
    with pytest.raises(UsageError, match="unknown option of fedexp 'epps'; did you mean eps"):
        fx.compare(study.task, ["fedexp"], runs=None, options={"epps": 1})


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda s: fx.run("digts"), "unknown task 'digts'; did you mean digits"),
        (lambda s: fx.run(s.task, cast(Any, fx.fedavg)), "call it, e.g. fedexp.fedavg()"),
        (lambda s: fx.run(s.task, "fedxp"), "unknown algorithm 'fedxp'; did you mean fedexp"),
        (lambda s: fx.run(s.train), "the task is Federation, not a Task"),
        (lambda s: fx.compare(s.task, []), "needs at least one algorithm"),
        (lambda s: fx.compare(s.task, ["fedavg"] * 2, runs=None), "two algorithms are called"),
        (lambda s: fx.tune(s.task, "fedexp", {"epps": [1.0]}), "unknown option of fedexp 'epps'"),
        (lambda s: fx.tune(s.task, "fedexp", {}), "the grid is empty"),
        (lambda s: fx.run(s.task, "fedexp", rounds=0), "rounds must be at least 1"),
        (lambda s: fx.run(s.task, "fedexp", rounds=10**30), "rounds must be at most 1,000,000,000"),
        (lambda s: fx.run(s.task, "fedexp", runs=3), "runs is 3; name a folder"),  # type: ignore[arg-type]
        (lambda s: fx.run(s.task, "fedexp", on_round=3), "on_round is 3; give a function"),  # type: ignore[arg-type]
        (lambda s: fx.compare(s.task, checkpoint_every=-1), "checkpoint_every is a number of"),
        (lambda s: UNTYPED.run(s.task, round=3), "unknown argument 'round'; did you mean rounds"),
        (
            lambda s: UNTYPED.compare(s.task, cohrt=3),
            "unknown argument 'cohrt'; did you mean cohort",
        ),
        (
            lambda s: UNTYPED.tune(s.task, metric="x"),
            "unknown argument 'metric'; choose from by_client",
        ),
        (lambda s: fx.compare(s.task, "fedavg"), "a list of algorithms, e.g. ['fedavg', 'fedexp']"),
        (lambda s: UNTYPED.compare(s.task, seeds=1.5), "seeds must be a whole number, not 1.5"),
        (lambda s: UNTYPED.compare(s.task, seeds=[0.2, 1]), "a seed must be a whole number: 0.2"),
        (lambda s: UNTYPED.compare(s.task, seeds="12"), "a seed must be a whole number: '1'"),
        (lambda s: fx.compare(s.task, seeds=[0, 1, 0]), "a seed is given twice: [0, 1, 0]"),
        (lambda s: fx.tune(s.task, stop_at=0.9), "trials run to their end; leave stop_at out"),
        (lambda s: fx.tune(s.task, evaluate_every=2), "leave evaluate_every out"),
        (lambda s: fx.run(s.task, s.mine, mode="recommended"), "has no effect on an Algorithm"),
        (
            lambda s: fx.compare(s.task, [s.mine, "study.py:mine"], mode="authors-code"),
            "mode 'authors-code' has no effect on an Algorithm",
        ),
        (lambda s: UNTYPED.compare(s.task, jobs="2"), "jobs must be a whole number, not '2'"),
        (lambda s: UNTYPED.compare(s.task, jobs=0), "jobs must be at least 1, not 0"),
        (lambda s: UNTYPED.compare(s.task, target="a"), "target must be a finite number, not 'a'"),
        (
            lambda s: UNTYPED.tune(s.task, "fedexp", {"eps": 0.1}),
            "0.1 for eps; give a list of values",
        ),
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


def test_server_rules_of_the_wrong_shape_get_one_line(study: Any) -> None:
    class Plain(fx.ServerRule):
        def step(self, params: Any, aggregate: Any, state: Any) -> Any:
            return params - aggregate.mean

    plain = fx.Algorithm("plain", server=Plain())
    with pytest.raises(UsageError, match="step of Plain returns Tensor; return the next param"):
        list(fx.simulate(study.task, plain, engine="loop"))
    with pytest.raises(UsageError, match=r"Plain is no dataclass; put @dataclass\(frozen=True\)"):
        fx.run(study.task, plain)


@pytest.mark.parametrize("method", ["init_client_state", "init_broadcast"])
def test_the_state_of_an_own_rule_must_be_named_tensors(study: Any, method: str) -> None:
    rule = type("Own", (fx.ClientRule,), {method: lambda self, params: (params,)})
    with pytest.raises(UsageError, match=f"{method} of Own returns tuple; return tensors by name"):
        fx.simulate(study.task, fx.Algorithm("own", client=rule()))


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


def test_own_rules_run_through_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["study.py:task", "--rounds", "3"]
    names = ["--algorithms", "fedavg,study.py:mine"]
    assert main(["compare", *own, *names, "--seeds", "2", "--set", "sign:lr=0.02"]) == 0
    assert (tmp_path / "compare-mine.png").exists()
    grid = ["--grid", "lr=0.01,0.05", "--jobs", "1"]
    assert main(["tune", *own, "--algorithm", "study.py:mine", *grid]) == 0
    assert "fedexp run study.py:task --algorithm study.py:mine" in capsys.readouterr().out
    assert main(["report", "runs", "-o", "report.html"]) == 0
    (folder,) = (tmp_path / "runs").glob("mine-sign-s1-*")
    expected = untimed(read_rows(folder))
    assert main(["resume", str(folder), "--restart"]) == 0
    assert untimed(read_rows(folder)) == expected


def test_arguments_of_a_function_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "study.py:make", "--rounds", "1", "--json"]
    assert main([*command, "--set", "task.width=3"]) == 0
    folder = json.loads(capsys.readouterr().out)["folder"]
    assert fx.load_model(folder).get_parameter("hidden.weight").shape == (3, 6)
    assert main([*command, "--set", "task.widht=3"]) == 2
    assert "did you mean task.width" in capsys.readouterr().err


def test_a_changed_file_is_named_and_reports_import_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "study.py:task", "--rounds", "2"]
    assert main(command) == 0
    path = tmp_path / "study.py"
    path.write_text(path.read_text().replace("torch.tanh(", "torch.relu("))
    words = [sys.executable, "-m", "fedexp", *command]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the code or the layers of the model differs; --restart discards it" in done.stderr
    path.write_text("raise RuntimeError('imported')\n")
    del sys.modules["study"]
    assert main(["report", "runs"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    capsys.readouterr()
    assert main(["resume", str(folder)]) == 2
    assert "study.py, line 1 raised RuntimeError: imported" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"load_model\(folder, model=Net\)"):
        fx.load_model(folder)


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


def test_a_task_made_here_may_have_any_name(study: Any) -> None:
    own = replace(study.make(), name="a/b: c")
    assert fx.run(own, "fedavg", rounds=1).folder == Path("runs") / next(
        path.name for path in Path("runs").iterdir() if path.name.startswith("a_b_c-fedavg")
    )


COHORTS = """
def choose(rng, round, federation):
    return [0, round]

from dataclasses import replace
chosen = replace(task, cohort=choose)
listed = replace(task, cohort=np.array([1, 2]))
counted = replace(task, cohort=np.int64(2), rounds=np.int64(4), evaluate_every=np.int64(2))
"""


@pytest.mark.parametrize("name", ["chosen", "listed", "counted"])
def test_the_cohort_of_a_task_may_be_of_every_kind(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path, COHORTS, "cohorts.py")
    task = load_object(f"cohorts.py:{name}")
    stored = fx.run(task, "fedexp")
    assert {row["clients"] for row in stored.rows} == {2}
    assert main(["resume", str(stored.folder), "--restart"]) == 0
    assert untimed(fx.run(task, "fedexp").rows) == untimed(stored.rows)
    capsys.readouterr()
    again = shlex.split(rerun(read_spec(cast(Path, stored.folder))))
    assert main([*again[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(stored.folder)


def test_numbers_of_numpy_are_numbers(study: Any) -> None:
    given = fx.run(study.task, fx.fedexp(eps=np.float64(0.5)), stop_at=cast(Any, np.float32(0.99)))
    named = fx.run(study.task, "fedexp", options={"eps": np.float32(0.5), "local.lr": 0.1})
    assert given.run.setup.options()["server.eps"] == 0.5
    assert named.run.setup.options()["server.eps"] == 0.5
    seeds = fx.compare(study.task, ["fedavg"], seeds=cast(Any, np.int64(2)))
    assert [outcome.spec.seed for outcome in seeds.outcomes] == [0, 1]
    one = fx.compare(study.task, ["fedavg"], seeds=cast(Any, np.array([1])))
    assert one.outcomes[0].stored == 4


ARGUMENTS = """
from pathlib import Path

def required(width):
    return make(int(width))

def untyped(width=2):
    return make(width)

def several(width: str | int | None = None, folder=Path("here"), table={"a": (1, None)}):
    return make(2 if width is None else width)
"""


@pytest.mark.parametrize("name", ["required", "untyped", "several"])
def test_functions_of_any_signature_make_tasks(name: str, tmp_path: Path) -> None:
    write_study(tmp_path, ARGUMENTS, "functions.py")
    reference = f"functions.py:{name}"
    stored = fx.run(reference, "fedavg", options={"task.width": 3})
    assert cast(Any, stored.model()).hidden.out_features == 3
    assert main(["resume", str(stored.folder), "--restart"]) == 0
    if name == "required":
        with pytest.raises(UsageError, match=r"needs --set task\.width"):
            fx.run(reference, "fedavg")


def test_none_is_the_default_of_every_setting(study: Any) -> None:
    unset = {"engine": None, "mode": None, "deterministic": None, "by_client": None}
    given = fx.run(study.task, runs=None, rounds=1, **cast(Any, unset))
    assert given.run.spec == fx.run(study.task, runs=None, rounds=1).run.spec


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
