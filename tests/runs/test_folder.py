"""The run folder: file modes, no secrets, commits of the code, the command that repeats a run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedexp
from fedexp.cli.options import experiment_of
from fedexp.errors import UsageError
from fedexp.experiment import Experiment
from fedexp.privacy.settings import CentralPrivacy
from fedexp.runs import folder as runs_folder
from fedexp.runs import load_run, read_spec
from fedexp.runs.folder import ENVIRONMENT, RunFolder, command, commits, machine
from fedexp.runs.spec import without_id
from fedexp.storage import PRIVATE, temporary, write_bytes
from fedexp_command.parsers import build_parser
from fedexp_command.rerun import rerun
from tests.runs.helpers import execute_in, interrupted, tiny

TOKEN = "run-token-4711"
SPEC = {
    "task": "app", "algorithm": "fedexp", "mode": "paper", "seed": 0, "rounds": 9,
    "evaluate_every": 1, "engine": "flower", "deterministic": False, "set": {}, "options": {},
}  # fmt: skip
FLOWER = ["/usr/bin/flwr-serverapp", "--serverappio-api-address", "x:1", "--token", TOKEN]


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """However freely a process shares its files by default."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


@pytest.mark.parametrize("states", ["memory", "disk"])
def test_states_and_the_environment_are_the_owners_alone(
    states: str, umask: int, tmp_path: Path
) -> None:
    seen: dict[str, int] = {}

    def look(*_: object) -> None:
        seen.update(modes(tmp_path / "run"))

    folder, experiment = tmp_path / "run", tiny("scaffold")
    execute_in(folder, experiment, look, client_store=states, checkpoint_every=0)
    private = {name for name in seen if name.startswith("checkpoint")} | {ENVIRONMENT}
    assert len(private) > 4
    assert "checkpoint-clients.slots" in private
    assert {name: seen[name] for name in private} == dict.fromkeys(private, PRIVATE)
    for name in ("records.jsonl", "spec.toml", "fingerprint.json"):
        assert seen[name] == 0o666 & ~umask
    assert modes(folder)["model.safetensors"] == 0o666 & ~umask


def test_a_file_that_was_open_to_all_is_private_once_it_is_written(tmp_path: Path) -> None:
    interrupted(tiny(), tmp_path, 2)
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    execute_in(tmp_path, tiny())
    assert modes(tmp_path)[ENVIRONMENT] == PRIVATE
    assert modes(tmp_path)["checkpoint.json"] == PRIVATE


def test_what_a_killed_writer_left_does_not_lend_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "state"
    temporary(path).write_bytes(b"left")
    temporary(path).chmod(0o666)
    write_bytes(path, b"new", PRIVATE)
    assert path.stat().st_mode & 0o777 == PRIVATE


def test_arguments_of_other_programs_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", FLOWER)
    assert command() == machine()["command"] == "flwr-serverapp"
    interrupted(tiny(), tmp_path, 2)
    execute_in(tmp_path, tiny())
    assert load_run(tmp_path).environment["resumed"][0]["command"] == "flwr-serverapp"
    assert not any(TOKEN in path.read_text(errors="ignore") for path in tmp_path.iterdir())


def test_arguments_of_fedexp_itself_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/bin/fedexp", "run", "toy", "--set", "a=b c"])
    assert command() == "fedexp run toy --set 'a=b c'"
    main = str(Path(fedexp.__file__).with_name("__main__.py"))
    monkeypatch.setattr(sys, "argv", [main, "run", "toy"])  # python -m fedexp, and torchrun
    assert command() == "__main__.py run toy"
    monkeypatch.setattr(sys, "argv", [""])
    assert command() == "python"


def test_a_token_that_an_older_version_stored_goes_when_a_run_on_flower_resumes(
    tmp_path: Path,
) -> None:
    with RunFolder(tmp_path, SPEC, {"fedexp": fedexp.__version__}):
        known = {"command": " ".join(FLOWER), "resumed": [{"round": 1, "command": TOKEN}]}
        (tmp_path / ENVIRONMENT).write_text(json.dumps(known))
    with RunFolder(tmp_path, SPEC, {}) as held:
        held.note_resumed(2)
    text = (tmp_path / ENVIRONMENT).read_text()
    assert TOKEN not in text
    assert [each["round"] for each in json.loads(text)["resumed"]] == [1, 2]
    assert read_spec(tmp_path)["engine"] == "flower"


def test_a_run_resumes_with_what_may_change_and_nothing_else(tmp_path: Path) -> None:
    """A name covers its table, and no name that only begins like it."""
    before = {**SPEC, "options": {"lr": 1.0, "lr_decay": 1.0, "config": {"a": 1, "b": 2}}}
    after = {**SPEC, "rounds": 12, "options": {"lr_decay": 1.0, "config": {"a": 3}}}
    with RunFolder(tmp_path, before, {}):
        pass
    for names in ((), ("rounds", "options.config"), ("rounds", "options.lr", "options.con")):
        with pytest.raises(UsageError, match="holds another run"):
            RunFolder(tmp_path, after, {}, may_change=names).__enter__()
    may_change = ("rounds", "options.lr", "options.config")
    with RunFolder(tmp_path, after, {}, may_change=may_change) as held:
        expected = {
            "options.config.a": (1, 3),
            "options.config.b": (2, None),
            "options.lr": (1.0, None),
            "rounds": (9, 12),
        }
        assert held.changes == expected
        assert read_spec(tmp_path)["rounds"] == 9  # nothing is stored before it is resumed
        assert held.note_resumed(4) == expected
    assert without_id(read_spec(tmp_path)) == after
    (resumed,) = load_run(tmp_path).environment["resumed"]
    assert resumed["changed"] == {name: list(pair) for name, pair in expected.items()}
    with RunFolder(tmp_path, after, {}) as held:
        assert held.note_resumed(4) == expected  # no round was stored since
        assert held.note_resumed(5) == {}
    assert "changed" not in load_run(tmp_path).environment["resumed"][1]
    with RunFolder(tmp_path, before, {}, may_change=may_change) as held:
        held.note_resumed(4)
        assert held.note_resumed(4) == {}  # all is as it was before round 5


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of the package, and nothing around it."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "checkout" / "fedexp"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.setattr(runs_folder, "PACKAGE", folder)
    runs_folder.commits_of.cache_clear()
    return folder


def test_the_commit_of_a_checkout_is_recorded(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert commits() == {}  # no repository
    git(package, "init")
    runs_folder.commits_of.cache_clear()
    assert commits() == {}  # one that does not know the package, as of an environment inside
    git(package, "add", ".")
    git(package, "commit", "-m", "one")
    head = git(package, "rev-parse", "HEAD")
    runs_folder.commits_of.cache_clear()
    assert commits() == {"git": {"fedexp": head, "fedexp_dirty": False}}
    (package / "__init__.py").write_text("changed = True")
    runs_folder.commits_of.cache_clear()
    assert commits() == {"git": {"fedexp": head, "fedexp_dirty": True}}


def test_the_commit_of_the_users_project_is_recorded_beside_it(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    git(project, "init")
    (project / "study.py").write_text("")
    git(project, "add", ".")
    git(project, "commit", "-m", "one")
    monkeypatch.chdir(project)
    expected = {"git": {"project": git(project, "rev-parse", "HEAD"), "project_dirty": False}}
    assert commits() == expected
    execute_in(tmp_path / "run", tiny())
    assert load_run(tmp_path / "run").environment["git"] == expected["git"]


def test_a_machine_without_git_has_no_commits(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(package, "init")
    monkeypatch.setenv("PATH", "")
    assert commits() == {}


EXPERIMENTS = [
    Experiment("toy", "fedexp"),
    Experiment("toy", "fedavg", seed=3, rounds=7, cohort=1, evaluate_every=2, engine="loop"),
    Experiment("toy", rounds=9, cohort=(1, 0), evaluate_every=(4, 2), by_client=True),
    Experiment("toy", mode="authors-code", options={"eps": 0.5, "task.start": (1, -2)}),
    Experiment("toy", "fedprox", device="cpu", precision="float32", deterministic=True),
    Experiment("toy", stop_at=0.25, privacy=CentralPrivacy(1.0, 1e-5, noise_multiplier=2.0)),
    Experiment("toy", options={"server.max_step": float("inf"), "local.clip_norm": None}),
]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: repr(experiment)[:60])
def test_the_command_gives_the_same_run(experiment: Experiment) -> None:
    words = shlex.split(rerun(experiment.spec))
    assert words[0] == "fedexp"
    again = experiment_of(build_parser().parse_args(words[1:]))
    assert again.spec == experiment.spec
    assert again.id == experiment.id


def test_values_are_quoted_for_a_shell() -> None:
    value = 'a b\'; $(rm x) "<script>"'
    words = shlex.split(rerun({**EXPERIMENTS[0].spec, "set": {"task.folder": value}}))
    assert words[-1] == f"task.folder={value}"
