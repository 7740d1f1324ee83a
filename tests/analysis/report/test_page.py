"""The page without a browser: its content, escaping, and that nothing is fetched."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from fedexp.analysis.report import page
from fedexp.analysis.report.charts import chart_names, main_metric
from fedexp.analysis.report.sections import Targets, sections
from fedexp.errors import UsageError
from fedexp.runs import StoredRun
from tests.helpers.stored_runs import stored

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
