"""The cases whose results are stored: what they run, by the public API alone.

A case is a function without arguments that returns an essence (`essence.py`). It runs in an empty
working directory, with one thread.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedexp as fx
import fedexp_command
from tests.golden.essence import Tree, columns, timeless, weights
from tests.helpers.own_study import write_study

ROUNDS = 4
ALGORITHMS = (
    "fedavg",
    "fedexp",
    "fedavgm",
    "fedexp-m",
    "fedprox",
    "fedprox-exp",
    "scaffold",
    "scaffold-exp",
    "fedadagrad",
    "fedadam",
    "fedyogi",
)
MORE = ("fedams", "fedexprox", "fedexprox-grads", "fedexprox-stops", "fedhyper", "fednova")
ENGINES = {
    "toy": ("loop", "quadratic", "auto"),
    "synthetic": ("loop", "batched", "quadratic", "auto"),
    "digits": ("loop", "threads", "batched", "dense", "auto"),
    "digits-mlp": ("loop", "threads", "batched", "dense", "auto"),
}
# With the tuned step sizes of the network rounding grows to some percent in four rounds.
STABLE = fx.LocalTraining(lr=0.05, weight_decay=1e-4, clip_norm=10.0, lr_decay=0.998)
CHANGED = {"fedadagrad": fx.fedadagrad(lr=0.003), "fedexprox-stops": fx.fedexprox_stops(mu=2.0)}
# Rules with the defaults of their classes, which the functions of the algorithms override.
RULES = {
    rule.__name__: fx.Algorithm("bare", server=rule())
    for rule in (
        fx.Average,
        fx.ExP,
        fx.Momentum,
        fx.MomentumExP,
        fx.Adagrad,
        fx.Adam,
        fx.Yogi,
        fx.AMS,
        fx.Hypergradient,
    )
} | {
    "Prox": fx.Algorithm("bare", fx.Prox()),
    "ProxEnvelope": fx.Algorithm("bare", fx.ProxEnvelope(), fx.StochasticPolyak()),
    "Nova": fx.Algorithm("bare", fx.Nova(), fx.NormalisedAverage()),
}
SMALL = {"task.clients": 6, "task.rows": 4, "task.dim": 40}  # of the synthetic task
SMALL_WORDS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


@contextmanager
def workplace() -> Iterator[Path]:
    """Run a case in an empty folder of its own, with one thread and without warnings."""
    threads = torch.get_num_threads()
    flower = logging.getLogger("flwr")
    with TemporaryDirectory() as folder, chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variables = {"FEDEXP_STATE": str(Path(folder, "state")), "FEDEXP_RUNS": ""}
        variables["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        with patch.dict(os.environ, variables), patch.object(flower, "disabled", True):
            try:
                yield Path(folder)
            finally:
                torch.set_num_threads(threads)


def compute(name: str) -> Tree:
    """Return the essence of a case, as it is read back from a file."""
    with workplace():
        essence = json.loads(json.dumps(CASES[name]()))
    sys.modules.pop("study", None)  # the user's own file
    return essence


# ---- tasks


@cache
def task(name: str) -> fx.Task:
    if name == "synthetic":
        return fx.tasks.synthetic(clients=6, rows=4, dim=40)
    build: dict[str, Callable[[], fx.Task]] = {
        "toy": fx.tasks.toy,
        "digits": fx.tasks.digits,
        "digits-mlp": fx.tasks.digits_mlp,
    }
    return build[name]()


class Convolutional(nn.Module):
    """A convolution, BatchNorm and dropout on images of 6 x 6 pixels."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.max_pool2d(torch.relu(self.norm(self.conv(x.unflatten(1, (1, 6, 6))))), 2)
        scores: Tensor = self.head(self.dropout(hidden.flatten(1)))
        return scores


class Grouped(nn.Module):
    """A convolution and GroupNorm, with weights that are shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.first, self.second = nn.Linear(36, 36), nn.Linear(36, 36)
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x.unflatten(1, (1, 6, 6))))).mean(1).flatten(1)
        scores: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(hidden)))))
        return scores


def images(model: Callable[[], nn.Module]) -> fx.Task:
    """Return three classes of noisy images, over clients of unequal size."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    x = (rng.normal(size=(3, 36))[y] + rng.normal(size=(120, 36))).astype(np.float32)
    ids = rng.choice(6, size=90, p=[0.3, 0.25, 0.2, 0.1, 0.1, 0.05])
    train = fx.Federation.from_ids({"x": x[:90], "y": y[:90]}, ids)
    test = {"x": torch.from_numpy(x[90:]), "y": torch.from_numpy(y[90:])}
    local = fx.LocalTraining(lr=0.1, steps=3, batch_size=4, weight_decay=1e-3, clip_norm=5.0)
    return fx.classification("images", model, train, test, local=local, cohort=4)


def texts(model: Callable[[], nn.Module]) -> fx.Task:
    """Return the next token of random sequences."""
    tokens = np.random.default_rng(1).integers(0, 12, size=(40, 9))
    train = fx.Federation.from_ids({"x": tokens[:, :-1], "y": tokens[:, 1:]}, np.arange(40) % 5)
    local = fx.LocalTraining(lr=0.5, epochs=1, batch_size=4)
    return fx.supervised("texts", model, train, local=local, cohort=3)


def recurrent() -> nn.Module:
    return fx.models.CharLSTM(12, embedding=4, hidden=8, layers=2)


def transformer() -> nn.Module:
    return fx.models.CharTransformer(12, length=8, width=8, heads=2, layers=1)


MODELS: dict[str, Callable[[], fx.Task]] = {
    "convolution": partial(images, Convolutional),
    "dropout": partial(images, partial(Convolutional, 0.3)),
    "group norm": partial(images, Grouped),
    "lstm": partial(texts, recurrent),
    "transformer": partial(texts, transformer),
}
OPTIMISERS = {
    "adam": fx.LocalTraining(lr=0.01, epochs=2, batch_size=8, optimizer="adam"),
    "momentum": fx.LocalTraining(lr=0.05, steps=3, batch_size=8, momentum=0.9, nesterov=True),
    "delta-sgd": fx.LocalTraining(lr=0.1, steps=3, batch_size=8, optimizer="delta-sgd"),
    "cosine": fx.LocalTraining(lr=0.1, steps=3, lr_schedule="cosine", step_schedule="linear"),
}


# ---- simulate


def of_records(records: list[fx.Record]) -> Tree:
    last = records[-1]
    try:
        tensors = last.model().state_dict()
    except fx.UsageError:  # least squares have no module
        tensors = {"params": last.state.output()[0]}
    rows = columns([record.to_json() for record in records])
    return {"rows": rows, "model": weights(tensors)}


def simulated(built: Callable[[], fx.Task], algorithm: fx.Algorithm | str, **options: Any) -> Tree:
    """Return records and model of a simulation; "refused" where the engine does not suit."""
    try:
        return of_records(list(fx.simulate(built(), algorithm, ROUNDS, **options)))
    except fx.UsageError:
        return "refused"


def automatic() -> Tree:
    """Return the engines that "auto" takes."""
    built = {name: partial(task, name) for name in ENGINES} | MODELS
    return {
        name: {
            algorithm: next(iter(fx.simulate(make(), algorithm, 1))).engine
            for algorithm in ("fedexp", "scaffold", "fedexprox-stops")
        }
        for name, make in built.items()
    }


def continued(algorithm: str) -> Tree:
    """Return a simulation that continues from a state on the disk, and one that starts warm."""
    digits = task("digits-mlp")
    simulate = partial(fx.simulate, digits, algorithm, engine="loop", local=STABLE)
    *_, second = simulate(2)
    fx.save_state(second.state, "state.safetensors")
    start = fx.load_state("state.safetensors")
    resumed, warm = list(simulate(ROUNDS, start=start)), list(simulate(2, start=second))
    return {"continued": of_records(resumed), "warm": of_records(warm)}


# ---- run, compare, tune


def of_run(result: fx.RunResult) -> Tree:
    return {"rows": columns(result.rows), "model": stored_weights(result.folder)}


def stored_weights(folder: Path | str | None) -> Tree:
    """Return the weights of a run folder, as `load_model` gives them where there is a module."""
    assert folder is not None
    try:
        return weights(fx.load_model(folder).state_dict())
    except fx.UsageError:  # least squares have no module
        return weights(load_file(Path(folder, "model.safetensors")))


def run(name: str, algorithm: Any, **settings: Any) -> Tree:
    return of_run(fx.run(name, algorithm, **{"rounds": ROUNDS, **settings}))


class Interruption(Exception):
    """Ends a run in the middle, as a bug in a user's callback does."""


def interrupt(row: dict[str, Any]) -> None:
    if row["round"] == 2:
        raise Interruption


def resumed(name: str, algorithm: str, **settings: Any) -> Tree:
    """Return a run that was interrupted after round 2, resumed, and extended by a round."""
    settings |= {"checkpoint_every": 0}
    with suppress(Interruption):
        fx.run(name, algorithm, rounds=ROUNDS, on_round=interrupt, **settings)
    resumed = of_run(fx.run(name, algorithm, rounds=ROUNDS, **settings))
    extended = of_run(fx.run(name, algorithm, rounds=ROUNDS + 1, **settings))
    return {"resumed": resumed, "extended": extended}


def resumed_by_command() -> Tree:
    """Return a run that Python began, `fedexp resume` ended, and another one extended."""
    with suppress(Interruption):
        fx.run("digits", "fedexp-m", rounds=ROUNDS, on_round=interrupt, checkpoint_every=0)
    (folder,) = Path("runs").iterdir()
    first = of_command(["resume", str(folder), "--json"])
    return [first, of_command(["resume", str(folder), "--rounds", "5", "--json"])]


def compared(name: str, algorithms: Any, **settings: Any) -> Tree:
    """Return the tables of a comparison, and all of its rows."""
    study = fx.compare(name, algorithms, **{"rounds": ROUNDS, "seeds": 2, **settings})
    tables = {format: study.table(format) for format in ("text", "csv", "markdown", "latex")}
    rows = {
        f"{outcome.algorithm} {outcome.seed}": columns(outcome.rows) for outcome in study.outcomes
    }
    return {"tables": tables, "rows": rows}


def tuned(name: str, algorithm: Any, grid: Any, **settings: Any) -> Tree:
    search = fx.tune(name, algorithm, grid, **{"rounds": ROUNDS, **settings})
    tables = {format: search.table(format) for format in ("text", "csv")}
    return {"best": search.best, "score": search.score, "tables": tables}


# ---- the command line


def command(words: list[str]) -> str:
    """Return what a command prints on stdout."""
    output = io.StringIO()
    quiet = [] if words[0] == "toy" else ["--quiet"]
    with (
        patch.object(sys, "argv", ["fedexp", *words, *quiet]),
        redirect_stdout(output),
        redirect_stderr(io.StringIO()) as errors,
    ):
        status = fedexp_command.main()
    assert status == 0, errors.getvalue()
    return output.getvalue()


def of_command(words: list[str]) -> Tree:
    """Return the JSON of a `run` or `resume`, with the rows and the model of its folder."""
    return of_printed(json.loads(command(words)))


def of_printed(printed: dict[str, Any]) -> Tree:
    return {"printed": timeless(printed), **of_folder(printed["folder"])}


def of_folder(folder: str) -> Tree:
    lines = Path(folder, "records.jsonl").read_text().splitlines()
    rows = columns([json.loads(line) for line in lines])
    return {"rows": rows, "model": stored_weights(folder)}


def run_command(name: str, algorithm: str, *words: str) -> Tree:
    return of_command(
        ["run", name, "--algorithm", algorithm, "--rounds", f"{ROUNDS}", "--json", *words]
    )


def printed(*words: str, formats: tuple[str, ...] = ("text", "csv", "json")) -> Tree:
    """Return what a command prints in several formats; the second time all is stored."""
    options = {"json": ["--json"], "csv": ["--format", "csv"], "text": []}
    output = {format: command([*words, *options[format]]) for format in formats}
    return {
        format: timeless(json.loads(text)) if format == "json" else text
        for format, text in output.items()
    }


def own_study() -> Tree:
    """Return runs of a user's own task and rules, from the command line and from Python."""
    write_study(Path.cwd())
    names = ("study.py:task", "study.py:mine")
    words = ["compare", "study.py:make", "--algorithms", f"{names[1]},fedexp", "--rounds", "3"]
    return {
        "command": run_command(*names),
        "python": run(*names, seed=1),
        "compare": printed(*words, "--jobs", "1", "--set", "task.width=5"),
    }


# ---- two ranks, and Flower


def two_ranks() -> Tree:
    """Return what two ranks of torchrun compute (`ranks.py`)."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "tests.golden.ranks"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert job.returncode == 0, job.stderr
    tree: Tree = json.loads(Path("ranks.json").read_text())
    return tree | {"command": of_printed(json.loads(job.stdout.splitlines()[-1]))}


def flower(strategy: str, **options: Any) -> Tree:
    """Return the metrics and the arrays of rounds on Flower, in this process."""
    from flwr.clientapp import ClientApp

    from fedexp import flower
    from tests.flower.helpers.fake_grid import FakeGrid

    digits = fx.tasks.digits_mlp(clients=5)
    app = ClientApp()
    app.train()(flower.simulated_train(digits, seed=0))
    app.evaluate()(flower.simulated_evaluate(digits))
    flower.report_client_id(app)

    def start(evaluate: Any) -> Any:
        made = flower.STRATEGIES[strategy](
            fraction_train=0.6, min_available_nodes=5, query_client_ids=True, **options
        )
        arrays = flower.initial_arrays(digits)
        return made.start(grid, arrays, num_rounds=ROUNDS, evaluate_fn=evaluate)

    evaluate, grid = flower.central_evaluation(digits), FakeGrid(app, 5)

    def interrupted(round: int, arrays: Any) -> Any:
        interrupt({"round": round})
        return evaluate(round, arrays)

    if "checkpoint" in options:
        with suppress(Interruption):
            start(interrupted)
    result = start(evaluate)
    parts = {
        "train": result.train_metrics_clientapp,
        "clients": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    rows = {part: columns([dict(each) for each in found.values()]) for part, found in parts.items()}
    return {"rows": rows, "model": weights(result.arrays.to_torch_state_dict())}


# ---- the table of all cases


def _cases() -> dict[str, Callable[[], Tree]]:
    cases: dict[str, Callable[[], Tree]] = {}
    for name, engines in ENGINES.items():
        some = ALGORITHMS if name in ("toy", "digits") else ALGORITHMS + MORE
        for algorithm in some:
            for engine in engines if algorithm in ALGORITHMS else ("loop", "auto"):
                options: dict[str, Any] = {"engine": engine, "algorithm": algorithm}
                if name == "digits-mlp":
                    options |= {"local": STABLE, "algorithm": CHANGED.get(algorithm, algorithm)}
                at = f"simulate {name} {algorithm} {engine}"
                cases[at] = partial(simulated, partial(task, name), **options)
    for name, rules in RULES.items():
        cases[f"simulate rule {name}"] = partial(simulated, partial(task, "synthetic"), rules)
    for name, built in MODELS.items():
        for algorithm in ("fedexp", "scaffold"):
            for engine in ("loop", "threads", "batched", "auto"):
                at = f"simulate {name} {algorithm} {engine}"
                cases[at] = partial(simulated, built, algorithm, engine=engine)
    for name, local in OPTIMISERS.items():
        for engine in ("loop", "batched"):
            built = partial(images, Grouped)
            at = f"simulate local {name} {engine}"
            cases[at] = partial(simulated, built, "fedexp", engine=engine, local=local)
    private = {
        "central privacy": fx.privacy.CentralPrivacy(0.5, 1e-2, noise_multiplier=0.1),
        "local privacy": fx.privacy.LocalPrivacy(0.5, 1e-2, noise_multiplier=0.1),
    }
    settings: dict[str, dict[str, Any]] = {
        "by size": {"weighting": "size"},
        "seed 1": {"seed": 1},
        "evaluated twice": {"evaluate_every": 2},
        "cyclic cohorts": {"cohort": fx.cohorts.cyclic(2)},
        "all clients": {"cohort": "all"},
        **{name: {"privacy": privacy} for name, privacy in private.items()},
    }
    for name, given in settings.items():
        cases[f"simulate {name}"] = partial(simulated, partial(images, Grouped), "fedexp", **given)
    cases["simulate engines of auto"] = automatic
    for algorithm in ("fedexp", "scaffold-exp", "fedadam"):
        cases[f"continue {algorithm}"] = partial(continued, algorithm)
    return cases | _run_cases() | _command_cases() | _flower_cases() | {"two ranks": two_ranks}


def _run_cases() -> dict[str, Callable[[], Tree]]:
    cases: dict[str, Callable[[], Tree]] = {
        f"run {name} {algorithm}": partial(run, name, algorithm)
        for name in ("toy", "digits")
        for algorithm in ALGORITHMS
    }
    cases |= {
        "run synthetic": partial(run, "synthetic", "fedexp", options=SMALL),
        "run object": partial(run, "digits-mlp", fx.fedexp(eps=0.1), seed=3, local=STABLE),
        "run options": partial(run, "digits", "fedexp-m", options={"eps": 0.01, "local.lr": 0.2}),
        "run authors": partial(run, "digits-mlp", "fedexp", mode="authors-code", local=STABLE),
        "run authors fedadam": partial(run, "digits", "fedadam", mode="authors-code"),
        "run recommended": partial(run, "digits-mlp", "fedexp", mode="recommended", local=STABLE),
        "run by client": partial(run, "digits", "fedexp", by_client=True),
        "run to a target": partial(run, "digits", "fedexp", rounds=9, stop_at=0.7),
        "resume digits": partial(resumed, "digits", "scaffold-exp"),
        "resume digits-mlp": partial(
            resumed, "digits-mlp", "fedexp-m", engine="loop", local=STABLE
        ),
        "resume synthetic": partial(resumed, "synthetic", "fedadagrad", options=SMALL),
        "compare digits": partial(compared, "digits", ["fedavg", "fedexp"], target=(0.6, 0.7)),
        "compare digits-mlp": partial(
            compared,
            "digits-mlp",
            ["fedexp", "scaffold", "fedavgm"],
            seeds=1,
            target=0.4,
            local=STABLE,
        ),
        "compare objects": partial(
            compared, "digits", [fx.fedavg(), fx.fedexp(), fx.fedprox_exp(mu=0.01)], smooth=2
        ),
        "compare workers": partial(compared, "digits", ["fedavg", "fedexp"], seeds=1, jobs=2),
        "compare synthetic": partial(
            compared, "synthetic", ["fedavg", "fedexp"], options={**SMALL, "fedexp:eps": 0.01}
        ),
        "tune grid": partial(tuned, "digits", "fedexp", {"local.lr": [0.05, 0.2], "eps": [0.1]}),
        "tune object": partial(tuned, "digits", fx.fedprox(), {"mu": [0.01, 0.1]}),
        "tune paper": partial(tuned, "synthetic", "fedadagrad", None, options=SMALL),
        "tune free": partial(
            tuned, "synthetic", "fedexp", None, options=SMALL, protocol="free", trials=6
        ),
    }
    return cases


def _command_cases() -> dict[str, Callable[[], Tree]]:
    one = ("--jobs", "1")
    algorithms = ("--algorithms", "fedavg,fedexp,scaffold")
    short = ("--rounds", f"{ROUNDS}")
    cases: dict[str, Callable[[], Tree]] = {
        f"fedexp run {name} {algorithm}": partial(run_command, name, algorithm)
        for name in ("toy", "digits")
        for algorithm in ALGORITHMS
    }
    return cases | {
        "fedexp run digits-mlp": partial(
            run_command, "digits-mlp", "fedexp", "--seed", "2", "--set", "local.lr=0.05"
        ),
        "fedexp run synthetic": partial(run_command, "synthetic", "scaffold", *SMALL_WORDS),
        "fedexp run options": partial(
            run_command, "digits", "fedexp", "--set", "eps=0.01", "--set", "local.epochs=1"
        ),
        "fedexp run authors": partial(
            run_command, "digits", "fedexp", "--mode", "authors-code", "--cohort", "0.1"
        ),
        "fedexp run text": partial(printed, "run", "toy", *short, "--no-save", formats=("json",)),
        "fedexp resume": resumed_by_command,
        "fedexp compare digits": partial(
            printed, "compare", "digits", *algorithms, *short, *one, "--target", "0.6,0.7"
        ),
        "fedexp compare synthetic": partial(
            printed, "compare", "synthetic", *short, *one, "--seeds", "2", *SMALL_WORDS
        ),
        "fedexp tune grid": partial(
            printed, "tune", "digits", *short, *one, "--grid", "local.lr=0.05,0.2"
        ),
        "fedexp tune paper": partial(
            printed, "tune", "synthetic", *short, *one, "--algorithm", "fedprox", *SMALL_WORDS
        ),
        "fedexp tune epsilon": partial(
            printed, "tune", "synthetic", *short, *one, "--epsilon", *SMALL_WORDS
        ),
        "fedexp toy": partial(printed, "toy", formats=("text",)),
        "own study": own_study,
    }


def _flower_cases() -> dict[str, Callable[[], Tree]]:
    cases: dict[str, Callable[[], Tree]] = {
        f"flower {name}": partial(flower, name) for name in ALGORITHMS
    }
    cases["flower by size"] = partial(flower, "fedexp", weighting="num-examples")
    cases["flower resumed"] = partial(flower, "scaffold-exp", checkpoint="runs/flower")
    return cases


CASES = _cases()
