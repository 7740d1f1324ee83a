"""Tasks, rules and functions of a user's file, or of this session, in runs and in workers."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import fedexp as fx
from fedexp.cli.main import main
from fedexp.errors import UsageError
from fedexp.references import load_object
from fedexp.runs.folder import RunWarning
from fedexp.runs.records import read_rows
from fedexp.runs.spec import read_spec
from fedexp_command.rerun import rerun
from tests.helpers.own_study import write_study
from tests.runs.helpers import untimed

pytestmark = pytest.mark.usefixtures("study")


def test_own_rules_run_through_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ["study.py:task", "--rounds", "3"]
    names = ["--algorithms", "fedavg,study.py:mine"]
    assert main(["compare", *task, *names, "--seeds", "2", "--set", "sign:lr=0.02"]) == 0
    assert (tmp_path / "compare-mine.png").exists()
    grid = ["--grid", "lr=0.01,0.05", "--jobs", "1"]
    assert main(["tune", *task, "--algorithm", "study.py:mine", *grid]) == 0
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


def test_a_changed_file_is_named_and_reports_import_nothing(tmp_path: Path) -> None:
    def fedexp(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "fedexp", *words], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr

    assert fedexp("run", "study.py:task", "--rounds", "2")[0] == 0
    path = tmp_path / "study.py"
    path.write_text(path.read_text().replace("torch.tanh(", "torch.relu("))
    status, error = fedexp("run", "study.py:task", "--rounds", "2")
    assert status == 2
    assert "the code or the layers of the model differs; --restart discards it" in error
    path.write_text("raise RuntimeError('imported')\n")
    assert fedexp("report", "runs")[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    status, error = fedexp("resume", str(folder))
    assert status == 2
    assert "study.py, line 1 raised RuntimeError: imported" in error
    assert "Traceback" not in error
    del sys.modules["study"]
    with pytest.raises(UsageError, match=r"load_model\(folder, model=Net\)"):
        fx.load_model(folder)


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
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if named is None:
        assert done.stdout == "[]\n"
    else:
        assert f"{named} differs in worker processes" in done.stdout


def test_server_rules_of_the_wrong_shape_get_one_line(study: Any) -> None:
    class Plain(fx.ServerRule):
        def step(self, params: Any, aggregate: Any, state: Any) -> Any:
            return params - aggregate.mean

    plain = fx.Algorithm("plain", server=Plain())
    with pytest.raises(UsageError, match="step of Plain returns Tensor; return the next param"):
        list(fx.simulate(study.task, plain, engine="loop"))
    with pytest.raises(
        UsageError, match=r"Plain is not a dataclass; put @dataclass\(frozen=True\)"
    ):
        fx.run(study.task, plain)


@pytest.mark.parametrize("method", ["init_client_state", "init_broadcast"])
def test_the_state_of_an_own_rule_must_be_named_tensors(study: Any, method: str) -> None:
    rule = type("Own", (fx.ClientRule,), {method: lambda self, params: (params,)})
    with pytest.raises(
        UsageError, match=f"{method} of Own returns tuple as state; return tensors by name"
    ):
        fx.simulate(study.task, fx.Algorithm("own", client=rule()))
