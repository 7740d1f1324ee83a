"""A stored trial stands for the same computation only, and changes no number of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode

import fedexp as fx
from fedexp.data import Federation, Images
from fedexp.engine import trial
from fedexp.engine.programs import SharedPrograms, objective_key
from fedexp.engine.select import LONG_TRIAL
from fedexp.engine.trial_cache import MOST_FILES, canonical, source_digest
from fedexp.errors import UsageError
from fedexp.local import LocalTraining
from fedexp.objective import ModuleObjective
from fedexp.references import load_object
from fedexp.tasks import Task
from tests.engine.helpers import ROOT
from tests.helpers.problems import least_squares

STORED = "verified against the loop on this kind of machine on 20"
SIZES = (7, 10, 6, 8)  # no batch of one example
LOCAL = LocalTraining(lr=0.1, steps=3, batch_size=4)
PLAIN, FEDEXP = Images((0.5,), (0.25,), augment=None), fx.fedexp()
Build = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of stored trials, of all engines on a CPU as well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FEDEXP_TRIALS", "once")
    return tmp_path / "fedexp" / "trials"


def layers(
    p: float = 0.2, eps: float = 1e-5, groups: int = 2, act: Build = nn.ReLU, width: int = 4
) -> nn.Module:
    """Build a network of torch's layers that the batched engine trains."""
    convolution = nn.Conv2d(1, width, 3, groups=1, padding=1)
    norm = nn.GroupNorm(groups, width, eps)
    head = nn.Linear(width * 16, 3)
    return nn.Sequential(convolution, norm, act(), nn.Flatten(), nn.Dropout(p), head)


def pixels(largest: int = 256) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, largest, (sum(SIZES), 1, 4, 4), dtype=np.uint8)
    x[0, 0, 0, :2] = 0, largest - 1
    y = rng.integers(0, 3, len(x))
    y[:3] = 0, 1, 2
    return {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}


@dataclass(frozen=True)
class Case:
    """The arguments of a run."""

    build: Build = layers
    loss: Any = None
    transform: Any = PLAIN
    local: LocalTraining = LOCAL
    algorithm: fx.Algorithm = FEDEXP
    engine: str = "batched"
    cohort: int = 3
    largest: int = 256
    options: tuple[tuple[str, Any], ...] = ()

    def task(self) -> Task:
        data = Federation(pixels(largest=self.largest), np.cumsum([0, *SIZES]))
        objective = ModuleObjective(self.build, self.loss)
        return Task("case", objective, data, self.local, transform=self.transform)

    def records(self, programs: SharedPrograms | None = None) -> list[fx.Record]:
        options: dict[str, Any] = {"engine": self.engine, "cohort": self.cohort}
        options |= dict(self.options)
        return list(fx.simulate(self.task(), self.algorithm, 3, programs=programs, **options))

    def is_stored(self) -> bool:
        """Return whether a run finds the trial of an earlier one; it stores its own if not."""
        choice = self.records()[0].engine_choice
        assert choice is not None
        assert (STORED in choice.reason) != ("it agrees with the loop" in choice.reason)
        return STORED in choice.reason


# The same computation ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(algorithm=fx.scaffold_exp()),
        Case(engine="threads"),
        Case(engine="loop"),
        Case(transform=Images((0.5,), (0.25,), pad=1), algorithm=fx.fedprox()),
        Case(local=replace(LOCAL, optimizer="adam")),
        Case(partial(layers, act=nn.Tanh), options=(("precision", "bf16"),)),
    ],
    ids=["layers", "scaffold", "threads", "loop", "augmented", "adam", "bf16"],
)
def test_runs_have_the_same_bits_with_and_without_a_trial(case: Case, folder: Path) -> None:
    before = torch.get_rng_state()
    first, second = case.records(), case.records()
    assert torch.equal(before, torch.get_rng_state())
    if case.engine != "loop":
        assert STORED in getattr(second[-1].engine_choice, "reason", "")
        assert len(list(folder.iterdir())) == 1
    for one, other in zip(first, second, strict=True):
        plain: dict[str, Any] = {"seconds": 0.0, "engine_choice": None}
        assert replace(one, **plain) == replace(other, **plain)
        assert torch.equal(one.state.params, other.state.params)
        assert torch.equal(one.state.output()[0], other.state.output()[0])
        assert set(one.state.clients) == set(other.state.clients)
        for client, own in one.state.clients.items():
            assert all(torch.equal(v, other.state.clients[client][n]) for n, v in own.items())


SAME = {
    "seed": Case(options=(("seed", 1),)),
    "learning rate": Case(local=replace(LOCAL, lr=0.3)),
    "schedule over rounds": Case(local=replace(LOCAL, lr_schedule=lambda round: 1 / round)),
    "server rule": Case(algorithm=fx.fedavg()),
    "weights": Case(options=(("weighting", "size"),)),
}


@pytest.mark.parametrize("case", SAME.values(), ids=SAME)
def test_what_a_trial_does_not_depend_on_is_not_part_of_its_key(case: Case) -> None:
    assert not Case().is_stored()
    assert case.is_stored()


@torch.no_grad()
def scaled(model: nn.Module, factor: float) -> nn.Module:
    for each in model.parameters():
        each.mul_(factor)
    return model


@torch.no_grad()
def frozen(model: nn.Module, value: float) -> nn.Module:
    first = next(model.parameters()).requires_grad_(False)
    first.fill_(value)
    return model


OTHER = {
    "dropout": Case(partial(layers, p=0.3)),
    "eps of a norm": Case(partial(layers, eps=1e-4)),
    "groups": Case(partial(layers, groups=4)),
    "activation": Case(partial(layers, act=nn.GELU)),
    "its setting": Case(partial(layers, act=partial(nn.GELU, "tanh"))),
    "width": Case(partial(layers, width=6)),
    "loss": Case(loss=nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)),
    "loss function": Case(loss=partial(F.cross_entropy, reduction="none")),
    "transform": Case(transform=Images((0.5,), (0.5,), augment=None)),
    "augmentation": Case(transform=Images((0.5,), (0.25,))),
    "range of the data": Case(largest=255),
    "scale of the weights": Case(lambda: scaled(layers(), 8.0)),
    "client rule": Case(algorithm=fx.fedprox(mu=0.1)),
    "its number": Case(algorithm=fx.fedprox(mu=0.2)),
    "scaffold": Case(algorithm=fx.scaffold()),
    "clipping": Case(local=replace(LOCAL, clip_norm=1.0)),
    "weight decay": Case(local=replace(LOCAL, weight_decay=0.1)),
    "batch size": Case(local=replace(LOCAL, batch_size=3)),
    "steps": Case(local=replace(LOCAL, steps=4)),
    "epochs": Case(local=replace(LOCAL, steps=None, epochs=1)),
    "momentum": Case(local=replace(LOCAL, momentum=0.5)),
    "schedule over steps": Case(local=replace(LOCAL, step_schedule="linear")),
    "cohort": Case(cohort=2),
    "engine": Case(engine="threads"),
    "precision": Case(options=(("precision", "bf16"),)),
    "frozen weights": Case(lambda: frozen(layers(), 1.0)),
    "their values": Case(lambda: frozen(layers(), 2.0)),
}


def test_every_ingredient_of_a_trial_is_part_of_its_key(folder: Path) -> None:
    """All cases differ from each other, and each is found by its own repetition."""
    cases = {"plain": Case(), **OTHER}
    for name, case in cases.items():
        assert not case.is_stored(), name
    assert len(list(folder.iterdir())) == len(cases)
    for name, case in cases.items():
        assert case.is_stored(), name


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


ENVIRONMENT: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "torch": lambda patch: patch.setattr(torch, "__version__", "9.9"),
    "fedexp": lambda patch: patch.setattr(fx, "__version__", "9.9"),
    "CUDA": lambda patch: patch.setattr(torch.version, "cuda", "99.9"),
    "variable": lambda patch: patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
    "constant": lambda patch: patch.setattr(trial, "ALLOWED", 5),
    "table of constants": lambda patch: patch.setitem(trial.NARROW, "bf16", 0.5),
    "cudnn": lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", True),
    "deterministic": lambda _: deterministic(),
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_the_environment_is_part_of_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Case().is_stored()
    change = ENVIRONMENT[name](monkeypatch)
    changed: AbstractContextManager[Any] = change if name == "deterministic" else nullcontext()
    with changed:
        assert not Case().is_stored()
    monkeypatch.undo()


def test_the_source_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of packages that no trial calls."""
    (tmp_path / "cli").mkdir()
    (tmp_path / "engine").mkdir()
    monkeypatch.setattr(fx, "__file__", str(tmp_path / "__init__.py"))
    digests = []
    for name in ("engine/loop.py", "engine/loop.py", "local.py", "table.json", "cli/main.py"):
        with open(tmp_path / name, "a") as stream:
            stream.write("1")
        source_digest.cache_clear()
        digests.append(source_digest())
    source_digest.cache_clear()
    assert len(set(digests)) == 4
    assert digests[-1] == digests[-2]


PROGRAM = """
from tests.engine.test_trial_cache import Case
print(Case().is_stored())
"""


def test_another_process_finds_the_trial() -> None:
    found = []
    for seed in ("1", "2"):  # sets have another order
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        found.append(done.stdout.strip())
    assert found == ["False", "True"]


def test_kernels_that_were_imported_since_make_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not Case().is_stored()
    kernels = ModuleType("fedexp.kernels.imported_later")
    vars(kernels).update({"triton": None, "TILE": 64})
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    assert Case().is_stored()


@pytest.mark.parametrize(
    "build",
    [
        fx.models.emnist_cnn,
        partial(fx.models.resnet18, 10),
        fx.models.char_lstm,
        fx.models.char_transformer,
        partial(nn.TransformerEncoderLayer, 4, 2, 8, activation=F.gelu),
        partial(nn.GRU, 4, 3, num_layers=2),
        lambda: (layer := nn.Linear(3, 3), nn.Sequential(layer, nn.ReLU(), layer))[1],
    ],
)
def test_models_of_known_layers_have_a_description(build: Build) -> None:
    one, other = (canonical(objective_key(ModuleObjective(build))) for _ in range(2))
    assert one == other


def test_tied_layers_are_not_separate_ones() -> None:
    tied, separate = nn.Linear(3, 3), (nn.Linear(3, 3), nn.Linear(3, 3))
    models = nn.Sequential(tied, tied), nn.Sequential(*separate)
    one, other = (canonical(objective_key(ModuleObjective(each))) for each in models)
    assert one != other


# Code of the user -------------------------------------------------------------------------------


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class Disguised(nn.ReLU):
    """A class that claims to be one of torch's."""


Disguised.__module__, Disguised.__qualname__ = nn.ReLU.__module__, nn.ReLU.__qualname__


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True)
class OwnImages(Images):
    """Images of a user's class."""


@dataclass(frozen=True)
class OwnRule(fx.SGD):
    """A client rule of a user's class."""


def hooked() -> nn.Module:
    model = layers()
    model[0].register_forward_hook(lambda module, args, output: None)  # type: ignore[index]
    return model


def own_forward(x: Tensor) -> Tensor:
    return x.relu()


def overridden() -> nn.Module:
    model = layers()
    model[2].forward = own_forward  # type: ignore[index]
    return model


def parametrized() -> nn.Module:
    model = layers()
    weight_norm(model[-1])  # type: ignore[index]
    return model


def tensor_hook() -> nn.Module:
    model = layers(p=0.0)
    next(model.parameters()).register_hook(lambda grad: grad)
    return model


USERS = {
    "layer": Case(partial(layers, act=Own)),
    "subclass": Case(partial(layers, act=Disguised)),
    "hook": Case(hooked),
    "method": Case(overridden, engine="threads"),
    "parametrization": Case(parametrized),
    "hook of a tensor": Case(tensor_hook, engine="threads"),
    "loss": Case(loss=own_loss),
    "partial loss": Case(loss=partial(own_loss)),
    "loss in torch's function": Case(loss=lambda o, t: F.cross_entropy(o, t, reduction="none")),
    "transform": Case(transform=OwnImages((0.5,), (0.25,), augment=None)),
    "client rule": Case(algorithm=fx.Algorithm("own", client=OwnRule())),
    "schedule": Case(local=replace(LOCAL, step_schedule=lambda step, steps: 1.0)),
    "optimiser": Case(
        local=replace(LOCAL, optimizer=lambda params, lr: torch.optim.SGD(params, lr)),
        engine="threads",
    ),
}


@pytest.mark.parametrize("case", USERS.values(), ids=USERS)
def test_code_of_the_user_is_tried_every_time(case: Case, folder: Path) -> None:
    for _ in range(2):
        assert not case.is_stored()
    assert not folder.exists()


def test_a_file_of_the_user_with_the_name_of_a_module_of_python(
    tmp_path: Path, folder: Path
) -> None:
    """It is the module of that name, since no other was imported before."""
    text = (
        "from torch import nn\nclass Own(nn.Module):\n    def forward(self, x): return x.relu()\n"
    )
    (tmp_path / "trace.py").write_text(text)
    assert "trace" not in sys.modules
    try:
        act = load_object(f"{tmp_path / 'trace.py'}:Own")
        assert act.__module__ == "trace"
        for _ in range(2):
            assert not Case(partial(layers, act=act)).is_stored()
    finally:
        sys.modules.pop("trace", None)
        sys.path.remove(str(tmp_path))
    assert not folder.exists()


class Mode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def global_hook() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def global_backward_hook() -> Iterator[None]:
    handle = nn.modules.module.register_module_full_backward_pre_hook(lambda module, grads: None)
    try:
        with warnings.catch_warnings():  # torch's, of a first layer, whose input needs no gradient
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        handle.remove()


def calls(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.enable_grad()(calls(function))


@dataclass(frozen=True, eq=False)
class Called:
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


FUNCTIONS = [(F, "relu"), (trial, "_distance")]
METHODS = [
    (torch.nn.ReLU, "forward"),
    (nn.Module, "__call__"),
    (torch.Tensor, "backward"),
    (trial.Trial, "check"),
    (fx.SGD, "end_round"),
    (ModuleObjective, "compile_kernels"),
]


@pytest.mark.parametrize(
    ("owner", "name", "replaced"),
    [
        *((*each, how) for each in FUNCTIONS for how in (calls, decorated, Called)),
        *((*each, how) for each in METHODS for how in (calls, decorated)),  # bound to instances
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_replaced_function_is_code_of_the_user(
    owner: Any, name: str, replaced: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Case().is_stored()
    assert Case().is_stored()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, replaced(getattr(owner, name)))
        assert not Case().is_stored()
    assert Case().is_stored()


@pytest.mark.parametrize("change", [Mode, global_hook, global_backward_hook])
def test_what_intercepts_all_calls_is_code_of_the_user(
    change: Callable[[], AbstractContextManager[Any]],
) -> None:
    Case().is_stored()
    with change():
        assert not Case().is_stored()
    assert Case().is_stored()


# The files --------------------------------------------------------------------------------------


def test_a_trial_that_fails_is_not_stored(folder: Path) -> None:
    """The update is zero: nothing can be compared."""
    case = Case(lambda: nn.Sequential(layers(), nn.Threshold(1e9, 0.0)))
    for _ in range(2):
        with pytest.raises(UsageError, match="the update is zero"):
            case.records()
    assert not folder.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: text.replace('"verified": "', '"verified": "x'),
        lambda text: text.replace('"key": "', '"key": "0'),
        lambda text: text.replace('"verified": "', '"verified": 5, "text": "'),
    ],
)
def test_a_damaged_file_is_replaced(folder: Path, change: Callable[[str], str]) -> None:
    assert not Case().is_stored()
    (file,) = folder.iterdir()
    file.write_text(change(file.read_text()))
    assert not Case().is_stored()
    assert Case().is_stored()


def test_a_folder_that_cannot_be_written_to_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    for _ in range(2):
        assert not Case().is_stored()


def test_the_number_of_files_is_bounded(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(MOST_FILES):
        (folder / f"{number}.json").write_text("{}")
        os.utime(folder / f"{number}.json", (1e9 + number, 1e9 + number))
    assert not Case().is_stored()
    assert len(list(folder.iterdir())) == MOST_FILES
    assert not (folder / "0.json").exists()
    assert Case().is_stored()


# When -------------------------------------------------------------------------------------------


def test_trials_can_be_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Case().is_stored()
    monkeypatch.setenv("FEDEXP_TRIALS", "always")
    assert not Case().is_stored()
    monkeypatch.setenv("FEDEXP_TRIALS", "never")
    with pytest.raises(UsageError, match="FEDEXP_TRIALS is auto, always or once, not 'never'"):
        Case().records()


def wide() -> nn.Module:
    hidden = LONG_TRIAL // 19
    return nn.Sequential(nn.Flatten(), nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def test_on_a_cpu_the_trials_of_large_models_are_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDEXP_TRIALS")
    small, large = Case(), Case(wide, engine="threads")
    for case in (small, large):
        assert not case.is_stored()
    assert len(list(folder.iterdir())) == 1
    assert not small.is_stored()
    assert large.is_stored()


def test_runs_that_share_programs_use_stored_trials_as_well() -> None:
    assert not Case().is_stored()
    programs = SharedPrograms()
    reasons = [
        getattr(case.records(programs)[0].engine_choice, "reason", "")
        for case in (Case(), Case(), Case(cohort=2))
    ]
    assert STORED in reasons[0]
    assert "an earlier run of this process" in reasons[1]
    assert "it agrees with the loop" in reasons[2]
    assert programs.trials == 1


def test_other_engines_have_stored_trials() -> None:
    task = least_squares(clients=4)
    for engine in ("quadratic", "batched"):
        options: dict[str, Any] = {"engine": engine}
        choices = [
            next(fx.simulate(task, fx.fedexp(), 1, **options)).engine_choice for _ in range(2)
        ]
        assert [STORED in getattr(each, "reason", "") for each in choices] == [False, True]
