"""The study of hostile clients: a short run of each attack, and the tables of its page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from tools.grid import read_csv
from tools.untrusted import __main__ as study
from tools.untrusted import lies
from tools.untrusted.protocol import ATTACKS, TASKS, Case, digits
from tools.untrusted.report import tables

PAGE = Path(__file__).parents[2] / "docs" / "untrusted-clients.md"


def test_the_page_has_the_tables_of_the_archived_runs() -> None:
    page = PAGE.read_text()
    for name, text in {"untrusted": tables(read_csv(study.FILE)), **lies.tables()}.items():
        block = page.partition(f"<!-- begin {name} -->")[2].partition("<!-- end")[0]
        assert block.strip() == text.strip()


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_run_against_a_bound_and_a_rule_of_flower(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    monkeypatch.setitem(TASKS, "digits", lambda: replace(digits(), rounds=2))
    study.task_of.cache_clear()
    for protection in ("FedExP, bound 5", "Krum"):
        accuracy, longest, diverged = study.run(Case("digits", attack, 0.1, protection, 0))
        assert 0 <= accuracy <= 100
        assert longest >= 1
        assert diverged == ""
    study.task_of.cache_clear()
