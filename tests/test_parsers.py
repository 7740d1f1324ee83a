"""The options of commands, which know nothing of the package, agree with it."""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib import import_module
from typing import get_args, get_type_hints

import pytest
import torch

from fedexp import experiment
from fedexp.algorithms import ALGORITHMS
from fedexp.analysis import tables
from fedexp.cli.data import partition_by
from fedexp.cli.main import MANY
from fedexp.cli.options import listed
from fedexp.data.datasets import RawSplits
from fedexp.engine.client_store import Location
from fedexp.engine.select import EngineName
from fedexp.experiment import FIELDS, Experiment, Options, Resources, Settings
from fedexp.modes import MODES
from fedexp.precision import Precision
from fedexp.privacy import Privacy
from fedexp_command import parsers
from tests.helpers.processes import finished

WORDS = {"run": ["toy"], "resume": ["run"], "compare": ["toy"], "tune": ["toy"], "reproduce": []}


def test_the_fields_of_an_experiment_are_listed_alike_everywhere() -> None:
    names = {"Privacy": Privacy}  # imported for type checkers only
    hints, settings, options = (
        get_type_hints(kind, localns=names) for kind in (Experiment, Settings, Options)
    )
    assert settings == {n: hints[n] for n in FIELDS if n not in ("task", "algorithm", "seed")}
    by_position = ("rounds", "cohort", "start")
    assert options == {n: hint for n, hint in settings.items() if n not in by_position}
    by_set = {"local", "weighting", "options"}
    assert set(parsers.FLAGS) == set(settings) - by_set


def test_copies_of_constants_are_equal() -> None:
    assert get_args(EngineName) == parsers.ENGINES
    assert get_args(Precision) == parsers.PRECISIONS
    assert tuple(tables.FORMATS) == parsers.FORMATS
    assert experiment.CHECKPOINT_EVERY == parsers.CHECKPOINT_EVERY
    assert Resources().checkpoint_every == parsers.CHECKPOINT_EVERY
    assert set(listed(parsers.COMPARED)) < set(ALGORITHMS)


def test_trials_are_those_of_a_search() -> None:
    from fedexp.tuning import search

    for protocol in set(get_args(search.Protocol)) - {"epsilon"}:
        args = parsers.build_parser().parse_args(["tune", "toy", "--protocol", protocol])
        assert args.protocol == protocol


@pytest.mark.parametrize("kind", parsers.PARTITIONS)
def test_every_partition_can_be_made(kind: str) -> None:
    """A natural one is that of the data."""
    splits = {"x": torch.zeros(60, 1, 2, 2, dtype=torch.uint8), "y": torch.arange(60) % 3}
    raw = RawSplits("mine", 3, splits, splits)
    parts = partition_by(raw, kind, Namespace(clients=4, alpha=1.0, shards=2, seed=0))
    assert (parts is None) == (kind == "natural")


def test_every_command_has_something_that_runs_it() -> None:
    for _, place, _ in parsers.COMMANDS.values():
        module, _, function = place.partition(":")
        assert callable(getattr(import_module(f"fedexp.cli.{module}"), function))
    assert set(MANY) == set(WORDS)


@pytest.mark.parametrize(
    ("option", "values", "commands"),
    [
        ("--client-states", get_args(Location), ("run", "resume")),
        ("--mode", set(MODES) - {"recommended"}, ("reproduce",)),
        ("--mode", MODES, ("run", "compare", "tune")),
    ],
)
def test_choices_are_those_of_the_package(
    option: str, values: list[str], commands: tuple[str, ...]
) -> None:
    for command in commands:
        for value in values:
            args = parsers.build_parser().parse_args([command, *WORDS[command], option, value])
            assert vars(args)[option[2:].replace("-", "_")] == value


HELP = """
import sys
from contextlib import redirect_stdout
from io import StringIO

from fedexp_command import main, parsers

of_data = [["data", action] for action in ("list", "fetch", "verify", "show")]
for words in [[], *([name] for name in parsers.COMMANDS), *of_data]:
    sys.argv = ["fedexp", *words, "--help"]
    with redirect_stdout(StringIO()) as text:
        try:
            main()
        except SystemExit as end:
            assert not end.code, words
    assert text.getvalue().startswith("usage: " + " ".join(["fedexp", *words])), words
print(sorted({"torch", "numpy", "fedexp"} & set(sys.modules)))
"""


def test_no_help_waits_for_the_import_of_torch() -> None:
    done = finished([sys.executable, "-c", HELP])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
