"""The table of a comparison, in all formats."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fedexp as fx
from fedexp.analysis.summary import summarise
from fedexp.analysis.tables import (
    comparison_numbers,
    comparison_table,
    format_bytes,
    format_value,
    render_table,
    text_table,
)
from tests.helpers.outcomes import outcome


def test_the_comparison_has_rounds_speed_up_and_spread() -> None:
    runs = [
        outcome("fedavg", 0, [0.1] * 2 + [0.7] * 7),
        outcome("fedavg", 1, [0.1] * 3 + [0.7] * 6),
        outcome("fedexp", 0, [0.1] + [0.7] * 7 + [0.8]),
        outcome("fedexp", 1, [0.7] * 8 + [0.6]),
    ]
    fedavg, fedexp = summarise(runs, "test_accuracy", 0.6)
    assert (fedavg.rounds, fedexp.rounds) == ([7, 8], [6, 1])
    assert fedexp.speedup == pytest.approx(7.5 / 3.5)
    assert fedexp.finals == [0.8, 0.6]
    headers, cells = comparison_table({0.6: [fedavg, fedexp]}, "test_accuracy", 9)
    assert headers[1:3] == ["rounds to 60.00%", "speed-up (2 seeds)"]
    assert cells[1] == ["fedexp", "3.5 ± 3.5", "2.14x", "70.00% ± 14.14%"]
    assert "fedexp" in text_table(headers, cells)


def test_without_all_seeds_at_the_target_there_is_no_mean() -> None:
    runs = [
        outcome("fedavg", 0, [0.1] * 10),
        outcome("fedavg", 1, [0.1] * 5 + [0.7] * 5),
        outcome("fedexp", 0, [0.7] * 10),
        outcome("fedexp", 1, [0.7] * 10),
    ]
    fedavg, fedexp = summarise(runs, "test_accuracy", 0.6)
    assert fedavg.mean_rounds is None
    assert fedavg.speedup is None
    assert (fedexp.speedup, fedexp.at_least) == (10.0, True)  # (10 + at least 10) / 2 rounds over 1
    _, cells = comparison_table({0.6: [fedavg, fedexp]}, "test_accuracy", 2)
    assert cells[0][1:3] == [">10 (1/2 seeds)", "-"]
    assert cells[1][2] == ">10.00x"


def test_without_a_target_there_are_no_rounds() -> None:
    lines = summarise([outcome("fedexp", 0, [0.1, 0.2])], "test_accuracy", None)
    headers, cells = comparison_table({None: lines}, "test_accuracy", 2, smooth=20)
    assert headers[1::2] == ["rounds to target", "final test accuracy (last 20 rounds)"]
    assert cells == [["fedexp", "-", "-", "20.00%"]]


def test_formats_of_the_comparison() -> None:
    runs = [outcome("fedavg", s, [0.1] + [0.7] * 5) for s in (0, 1)]
    runs += [outcome("a_b", 0, [0.9] * 6), outcome("a_b", 1, [0.9] * 6, diverged_at=7)]
    lines = summarise(runs, "test_accuracy", 0.6)
    headers, cells = comparison_numbers({0.6: lines})
    by_name = [dict(zip(headers, row, strict=True)) for row in cells]
    assert (by_name[0]["rounds_mean"], by_name[0]["final_std"]) == ("6.0", "0.0")
    assert (by_name[1]["speedup"], by_name[1]["final_mean"]) == ("6.0", "")
    headers, cells = comparison_numbers({0.6: lines, 0.8: summarise(runs, "test_accuracy", 0.8)})
    by_name = [dict(zip(headers, row, strict=True)) for row in cells]
    assert (by_name[0]["reached"], by_name[0]["reached_0.8"]) == ("2", "0")
    assert (by_name[1]["rounds_mean"], by_name[1]["rounds_mean_0.8"]) == ("1.0", "1.0")
    table = comparison_table({0.6: lines}, "test_accuracy", 2)
    assert "a\\_b & 1.0 $\\pm$ 0.0" in render_table("latex", *table)
    assert "| 70.00% ± 0.00% |" in render_table("markdown", *table)
    with pytest.raises(fx.UsageError, match="did you mean markdown"):
        render_table("markdwon", *table)


def test_cells_state_seeds_rounds_and_references_where_they_differ() -> None:
    runs = [outcome("fedavg", seed, [0.1] * 7 + [0.7] * 5) for seed in (0, 1)]
    runs += [outcome("fedavg", 2, [0.1, 0.1]), outcome("fedexp", 0, [0.1] + [0.7] * 5)]
    lines = summarise(runs, "test_accuracy", 0.6)
    _, cells = comparison_table({0.6: lines}, "test_accuracy", 10)
    assert cells[0][1] == "12.0 ± 0.0 (2 of 3 seeds)"
    assert cells[0][3] == "70.00% ± 0.00% at round 12 (2 of 3 seeds)"
    assert cells[1][1:] == ["6", "2.00x", "70.00% at round 6"]
    other = replace(lines[1], reference="fedavg lr=1")
    _, cells = comparison_table({0.6: [lines[0], other]}, "test_accuracy", 10)
    assert [row[2] for row in cells] == ["1.00x over fedavg", "2.00x over fedavg lr=1"]


def test_a_speed_up_has_an_interval_from_five_seeds_on() -> None:
    curves = [[0.1] * seed + [0.7] * (20 - seed) for seed in range(5)]
    runs = [outcome("fedavg", seed, [0.1] * 9 + curve) for seed, curve in enumerate(curves)]
    runs += [outcome("fedexp", seed, curve) for seed, curve in enumerate(curves)]
    for count, header, cell in [
        (5, "speed-up [95%]", "2.58x [1.15, 8.97]"),
        (4, "4 seeds", "2.82x"),
    ]:
        lines = summarise([r for r in runs if r.seed < count], "test_accuracy", 0.6)
        headers, cells = comparison_table({0.6: lines, 0.7: lines}, "test_accuracy", 1)
        assert header in headers[2]
        assert headers[4] == headers[2]
        assert [row[2] for row in cells] == [row[4] for row in cells] == ["1.00x", cell]
    headers, cells = comparison_numbers({0.6: summarise(runs, "test_accuracy", 0.6)})
    numbers = dict(zip(headers, cells[1], strict=True))
    assert (
        float(numbers["speedup_low"]) < float(numbers["speedup"]) < float(numbers["speedup_high"])
    )


def test_some_seeds_that_diverged_are_counted() -> None:
    runs = [outcome("fedadam", 0, [0.1]), outcome("fedadam", 1, [0.1], diverged_at=2)]
    _, cells = comparison_table({0.6: summarise(runs, "test_accuracy", 0.6)}, "test_accuracy", 1)
    assert cells[0][3] == "diverged (1 of 2 seeds)"


def test_an_arrow_shows_which_way_is_better_where_the_name_does_not() -> None:
    for metric, higher, end in [
        ("test_f1", True, "f1 ↑"),
        ("test_perplexity", False, "perplexity ↓"),
        ("test_accuracy", True, "accuracy"),
        ("test_loss", False, "loss"),
    ]:
        headers, _ = comparison_table({None: []}, metric, 1, higher=higher)
        assert headers[3].endswith(end)
    assert "$\\uparrow$" in render_table("latex", ["f1 ↑"], [])


def test_numbers_of_all_kinds_of_metrics() -> None:
    assert format_value(0.5, "train_accuracy_worst_decile") == "50.00%"
    assert format_value(12.34567, "test_mae") == "12.35"
    assert format_value(0.12345, "test_loss") == "0.123"
    assert [format_bytes(n) for n in (0, 999.9, 1e6, 2.5e13)] == ["0 B", "1 kB", "1 MB", "25 TB"]
