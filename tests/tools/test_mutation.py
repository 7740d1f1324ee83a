"""The mutation score: its mutants, and a campaign on a package of one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tools import mutation

SOURCE = b'''"""A file."""

def count(n: int = 1) -> int:
    """Count."""
    if not (n >= 0 and True):
        raise ValueError(f"{n + 1}")
    require(n in (0.5, 11), "a message")
    return n - 1
'''
MUTANTS = {
    "def count(n: int = 1) -> int:": ["def count(n: int = 0) -> int:"],
    "if not (n >= 0 and True):": [
        "if (n >= 0 and True):",
        "if not ((n >= 0 or True)):",
        "if not ((n > 0) and True):",
        "if not (n >= 1 and True):",
        "if not (n >= 0 and False):",
    ],
    'raise ValueError(f"{n + 1}")': ["pass"],
    'require(n in (0.5, 11), "a message")': [
        "pass",
        'require((n not in (0.5, 11)), "a message")',
        'require(n in (1.5, 11), "a message")',
    ],
    "return n - 1": ["return None", "return (n + 1)", "return n - 0"],
}


def test_mutants_change_one_place() -> None:
    lines = SOURCE.decode().splitlines()
    made: dict[str, list[str]] = {}
    for mutant in mutation.mutants("a.py", SOURCE):
        changed = mutant.apply(SOURCE).decode().splitlines()
        ((old, new),) = ((a, b) for a, b in zip(lines, changed, strict=True) if a != b)
        made.setdefault(old.strip(), []).append(new.strip())
    assert made == MUTANTS


def test_a_seed_draws_the_same_mutants_of_the_package() -> None:
    drawn = mutation.sample(mutation.FILES, 7, 50)
    assert drawn == mutation.sample(mutation.FILES, 7, 50)
    assert len(set(drawn)) == 50
    assert drawn != mutation.sample(mutation.FILES, 8, 50)
    for mutant in drawn:
        source = (mutation.ROOT / mutant.path).read_bytes()
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    tests = {name for mutant in drawn for name in mutation.mirrors(mutant.path)}
    assert "tests/privacy/test_mechanism.py" in tests
    assert all((mutation.ROOT / name).exists() for name in tests)


def test_a_campaign_leaves_the_checkout_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def even(n):\n    return n % 2 == 0\n"
    test = "from fedexp.even import even\n\n\ndef test_even():\n    assert even(6)\n"
    for name, text in {"src/fedexp/even.py": source, "tests/test_even.py": test}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).with_name("__init__.py").touch()
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    monkeypatch.setattr(mutation, "CONTRACT", ())
    mutation.main(["--only", "*.py"])
    by_file, *survivors, score = capsys.readouterr().out.splitlines()
    assert by_file == "src/fedexp/even.py {'killed': 3, 'survived': 1, 'timeout': 0}"
    assert survivors == ["src/fedexp/even.py:2: return n % 2 == 0 -> return n % 3 == 0"]
    assert score.startswith("seed 0: detected 3 of 4, 75.0%, 95 % interval ")
    assert (tmp_path / "src/fedexp/even.py").read_text() == source
    assert mutation.run_tests(tmp_path, ["tests"], 0.01) == "timeout"
    (tmp_path / "tests/test_even.py").write_text(test.replace("even(6)", "even(5)"))
    with pytest.raises(SystemExit, match="assert False"):
        mutation.main(["--only", "*.py"])
