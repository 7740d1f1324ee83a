"""The page without a browser: its content, escaping, and that nothing is fetched."""

from __future__ import annotations

import html
import json
import re
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedexp.analysis.report import page
from fedexp.analysis.report.charts import chart_names, main_metric
from fedexp.analysis.report.sections import Targets, sections
from fedexp.errors import UsageError
from fedexp.runs import StoredRun
from fedexp.runs.spec import spec_text
from tests.helpers.stored_runs import stored, write

plotly_source = page.plotly_source
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{data}}"


class Elements(HTMLParser):
    """The tags of a page with their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._code = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._code = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._code = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._code else data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(autouse=True)
def _without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out five megabytes that these tests do not need."""
    monkeypatch.setattr(page, "plotly_source", lambda: "window.Plotly = null")


def made(*runs: StoredRun, wanted: tuple[str, ...] = (), target: tuple[str, ...] = ()) -> str:
    return page.render(sections(runs), wanted, Targets.parse(target))


def test_text_of_users_stays_text() -> None:
    options = [{"task.folder": HOSTILE, "server.eps": value} for value in (HOSTILE, "1")]
    text = made(*(stored(options=option) for option in options))
    elements = Elements(text)
    assert len(elements.all("script")) == 3
    assert not elements.all("img")
    assert all(not name.startswith("on") for _, tag in elements.tags for name in tag)
    assert elements.text.count(HOSTILE) >= 4  # title, label, setting, command
    numbers = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert numbers is not None
    assert HOSTILE in json.loads(numbers[1])[0]["series"][1]["name"]


def test_nothing_is_fetched() -> None:
    elements = Elements(made(stored()))
    links = [value for _, tag in elements.tags for key, value in tag.items()
             if key in ("src", "href", "srcset", "action", "data", "poster")]  # fmt: skip
    assert all(value is not None and value.startswith(("#", "data:")) for value in links)
    (policy,) = [meta["content"] for meta in elements.all("meta") if "http-equiv" in meta]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_one_section_per_task_and_a_chart_per_metric_with_data() -> None:
    elements = Elements(made(stored(), stored(options={"task.start": "1,1"})))
    charts = [figure["data-chart"] for figure in elements.all("figure")]
    assert charts == ["test_accuracy", "train_loss", "server_lr", "diversity"] * 2
    assert [link["href"] for link in elements.all("a")] == ["#task-0", "#task-1"]


def test_only_the_metrics_asked_for() -> None:
    elements = Elements(made(stored(), wanted=("train_loss",)))
    assert [figure["data-chart"] for figure in elements.all("figure")] == ["train_loss"]
    assert "final train loss" in elements.text


def test_the_table_has_the_target_of_the_task_by_default() -> None:
    runs = [stored("fedavg", speed=0.05), stored("fedexp")]
    assert "rounds to 90.00%" in made(*runs)
    assert "rounds to 80.00%" in made(*runs, target=("toy=80",))
    assert "rounds to 0.1" in made(*runs, wanted=("train_loss",), target=("0.1",))


def test_several_targets_have_columns_and_lines_of_their_own() -> None:
    runs = [stored("fedavg", speed=0.05), stored("fedexp")]
    text = made(*runs, target=("0.8,0.9",))
    headers = "rounds to 80.00%speed-up (1 seed)rounds to 90.00%speed-up (1 seed)"
    assert headers in Elements(text).text
    numbers = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert numbers is not None
    (chart, *others) = json.loads(numbers[1])[0]["charts"]
    assert chart["targets"] == [0.8, 0.9]
    assert all(other["targets"] == [] for other in others)


def test_a_target_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="--target"):
        made(stored(), target=("toy=-3",))
    with pytest.raises(UsageError, match="--target must be a number"):
        Targets.parse(["toy=high"])


def test_unfinished_runs_are_listed_and_not_compared() -> None:
    slow = stored("fedavg", seed=1, count=5, result=None, speed=0.01)
    text = Elements(made(stored("fedavg"), slow)).text
    assert "fedavg (seed 1) is unfinished: 5 of 30 rounds" in text
    assert "seeds)" not in text  # the one that has ended has reached the target
    assert "nothing to compare" in made(slow)


def test_a_missed_target_counts_with_the_rounds_of_its_own_run() -> None:
    longer = stored("fedexp", count=5, result=None, rounds=2000)
    text = Elements(made(stored("fedavg", speed=0.01), longer)).text
    assert ">30 (0/1 seeds)" in text
    assert "30 to 2000 rounds" in text


def test_a_run_that_diverged_is_listed() -> None:
    result = {"status": "diverged", "rounds": 9, "diverged_at": 9, "seconds": 1.0}
    text = made(stored("fedavg", count=9, result=result))
    assert "fedavg (seed 0) diverged at round 9" in text
    assert '"status":"diverged at round 9"' in text


def test_a_run_without_a_round_is_shown_all_the_same() -> None:
    text = Elements(made(stored(count=0, result=None))).text
    assert "unfinished: 0 of 30 rounds" in text


def test_charts_and_tables_have_names() -> None:
    elements = Elements(made(stored()))
    plots = [div for div in elements.all("div") if div.get("class") == "plot"]
    assert all((plot["aria-label"] or "").startswith("Line chart of") for plot in plots)
    assert len(elements.all("caption")) == len(elements.all("table"))
    assert [tag for tag, _ in elements.tags].count("h1") == 1


def test_the_main_metric() -> None:
    (section,) = sections([stored()])
    assert main_metric(section, ()) == "test_accuracy"
    assert main_metric(section, ("server_lr", "train_loss")) == "train_loss"
    assert chart_names(section, ("server_lr", "test_loss")) == ["server_lr"]


def test_a_full_spec_has_no_steps_beside_epochs() -> None:
    run = stored("fedavg", options={"local.epochs": "2", "local.steps": "none"})
    assert "local.steps" in run.spec["options"]
    text = made(run)
    assert '"local.epochs" = "2"' in html.unescape(text)
    assert "local.steps" not in text.split("[options]")[1].split("</pre>")[0]


def test_without_plotly_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UsageError, match=re.escape("pip install 'fedexp[report]'")):
        plotly_source()


def test_nested_entries_of_an_environment_have_dotted_names() -> None:
    run = stored()
    run.environment["git"] = {"fedexp": "69a56f", "fedexp_dirty": True}
    text = Elements(made(run)).text
    assert "git.fedexp69a56f" in text
    assert "git.fedexp_dirtyyes" in text


def test_the_engine_is_shown_where_it_is_recorded() -> None:
    choice = {"name": "batched", "reason": "auto: on a GPU", "implementation": "layers"}
    known = stored("fedexp")
    known.environment["engine"] = {**choice, "cuda_graph": "round"}
    text = Elements(made(known, stored("fedavg"))).text
    assert "batched (layers)" in text  # in the list of runs
    for entry in ("engine reason", "auto: on a GPU", "engine implementation", "CUDA graph"):
        assert entry in text
    assert "engine reason" not in Elements(made(stored())).text


def with_f1(algorithm: str = "fedexp", **more: Any) -> StoredRun:
    """Return a run of a task whose goal is a metric of the user's."""
    run = stored(algorithm, **more)
    run.environment.update(metric="test_f1", goal="max:test_f1", target=0.5)
    for row in run.rows:
        row |= {"test_f1": row["round"] / 40, "test_perplexity": 1e5 / row["round"] ** 4}
        row |= {"train_accuracy_worst_decile": 0.25, "bytes_up": 1000, "bytes_down": 3000}
    return run


def test_the_goal_comes_first_and_every_metric_is_drawn() -> None:
    text = made(with_f1(), with_f1("fedavg"))
    elements = Elements(text)
    charts = [figure["data-chart"] for figure in elements.all("figure")]
    assert charts[:3] == ["test_f1", "test_accuracy", "train_loss"]
    assert set(charts) > {"test_perplexity", "train_accuracy_worst_decile", "server_lr"}
    assert "↑ higher is better" in elements.text
    for cell in ("rounds to 0.5", "final test f1 ↑", "0.75", "last test f1"):
        assert cell in elements.text
    numbers = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert numbers is not None
    by_name = {chart["name"]: chart for chart in json.loads(numbers[1])[0]["charts"]}
    assert by_name["test_perplexity"]["log"]
    assert by_name["train_accuracy_worst_decile"]["percent"]
    assert by_name["test_f1"]["targets"] == [0.5]


def test_any_number_of_the_records_is_drawn_where_asked_for() -> None:
    elements = Elements(made(with_f1(), wanted=("bytes_up", "clients")))
    assert [figure["data-chart"] for figure in elements.all("figure")] == ["bytes_up", "clients"]


def test_a_target_needs_a_direction() -> None:
    with pytest.raises(UsageError, match="write --metric max:test_perplexity or min:"):
        made(with_f1(), wanted=("test_perplexity",), target=("3",))


def test_a_metric_may_state_its_direction(tmp_path: Path) -> None:
    folder = write(tmp_path / "runs", "fedexp", 0)
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    more = "".join(json.dumps(row | {"test_mae": 9 / row["round"]}) + "\n" for row in lines)
    (folder / "records.jsonl").write_text(more)
    out = tmp_path / "report.html"
    page.write_report([folder], out, metrics=["min:test_mae"], targets=Targets(1.0))
    text = Elements(out.read_text()).text
    assert "rounds to 1speed-upfinal test mae ↓" in text
    assert "fedexp12-0.3" in text  # the mean of rounds 8 to 12


def test_the_bytes_that_were_sent() -> None:
    assert "sent per runfedexp" in (text := Elements(made(with_f1())).text)
    assert "120 kB" in text  # 30 rounds of 4 kB
    assert "sent per run" not in made(stored())


def test_unequal_lengths_leave_speed_ups_and_say_so() -> None:
    runs = [stored("fedavg", seed, speed=0.08) for seed in (0, 1)]
    runs += [stored("fedexp", seed, speed=0.2) for seed in (0, 1)]
    result = {"status": "finished", "rounds": 3, "diverged_at": None, "seconds": 1.0}
    runs.append(stored("fedavg", 2, count=3, rounds=3, result=result))
    text = Elements(made(*runs)).text
    assert "(2 of 3 seeds)" in text
    assert "fedexp13.0 ± 0.01.92x" in text
    assert "too few rounds to reach the target do not count" in text


def test_a_run_that_diverged_leaves_the_axis_to_the_others() -> None:
    result = {"status": "diverged", "rounds": 9, "diverged_at": 9, "seconds": 1.0}
    gone = stored("fedadam", count=9, result=result)
    gone.rows[-1]["train_loss"] = 1e20
    text = made(stored(), gone)
    numbers = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert numbers is not None
    by_name = {chart["name"]: chart for chart in json.loads(numbers[1])[0]["charts"]}
    assert by_name["train_loss"]["range"][1] < 2
    assert by_name["test_accuracy"]["range"] is None


@pytest.mark.parametrize(
    ("cohort", "words"),
    [
        (1, "1 of 2 clients per round"),
        (0.5, "50% of 2 clients per round"),
        ([0], "1 of 2 clients per round"),
        ("night", "clients of 2 by night"),
    ],
)
def test_cohorts_of_every_kind(cohort: Any, words: str) -> None:
    assert words in made(stored(cohort=cohort))


def test_own_files_are_in_the_commands_and_are_never_imported(tmp_path: Path) -> None:
    study = tmp_path / "study.py"
    study.write_text("raise RuntimeError('imported')\n")
    folder = write(tmp_path / "runs", "mine", 0)
    spec = tomllib.loads((folder / "spec.toml").read_text())
    own = {name: value for name, value in spec.items() if name not in ("format", "id")}
    own |= {"task_source": f"{study}:task", "algorithm_source": f"{study}:mine"}
    (folder / "spec.toml").write_text(spec_text(own | {"task": "own"}))
    out = tmp_path / "report.html"
    page.write_report([folder], out, figures=tmp_path / "figures")
    assert f"fedexp run {study}:task --algorithm {study}:mine --seed 0" in out.read_text()
    assert "study" not in sys.modules
