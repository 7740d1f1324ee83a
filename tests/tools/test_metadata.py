"""The project's metadata: one version, valid files for GitHub, a pin for every package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tools.check_versions import lowest, requirements

import fedexp

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCHEMAS = {
    "vendor.citation-file-format": ["CITATION.cff"],
    "vendor.github-workflows": [".github/workflows/ci.yml"],
    "custom.github-workflows-require-timeout": [".github/workflows/ci.yml"],
    "vendor.github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.github-issue-forms": [
        f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("algorithm", "bug", "question")
    ],
}


def names(requirements: list[str]) -> set[str]:
    """Return the normalised names of packages, without extras and versions."""
    return {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!]", r)[0]).lower() for r in requirements}


@pytest.mark.skipif(not GITHUB.exists(), reason="an sdist has no .github")
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_are_valid(schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    ended = subprocess.run(
        [*command, *SCHEMAS[schema]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_one_version() -> None:
    version = fedexp.__version__
    releases = re.findall(
        r"^## (\d\S+) \((\d{4}-\d\d-\d\d)\)", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    citation = (ROOT / "CITATION.cff").read_text()
    assert releases[0][0] == version
    assert f"\nversion: {version}\n" in citation
    assert f'\ndate-released: "{releases[0][1]}"\n' in citation
    assert f"version = {{{version}}}" in (ROOT / "docs" / "citing.md").read_text()
    assert f"| {version.rpartition('.')[0]}.x | yes |" in (ROOT / "SECURITY.md").read_text()


@pytest.mark.skipif(not GITHUB.exists(), reason="an sdist has no .github")
def test_the_workflow_tests_the_classified_pythons() -> None:
    classified = re.findall(r"Python :: (3\.\d+)'", str(PROJECT["classifiers"]))
    workflow = (GITHUB / "workflows" / "ci.yml").read_text()
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    assert re.findall(r"3\.\d+", matrix) == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"


def test_links_are_of_one_repository() -> None:
    urls = PROJECT["urls"]
    assert all(url.startswith(urls["Homepage"]) for name, url in urls.items() if name != "Paper")
    for name in ("CITATION.cff", "docs/citing.md"):
        text = (ROOT / name).read_text()
        assert urls["Homepage"] in text
        assert urls["Paper"] in text


def test_every_package_of_dev_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = PROJECT["dependencies"] + [r for group in extras.values() for r in group]
    unpinned = names(asked) - names((ROOT / "constraints.txt").read_text().splitlines())
    # Extras that dev leaves out: each would install a large client library.
    assert unpinned == {"fedexp", "flwr-datasets", "mlflow-skinny", "wandb"}


def test_lowest_versions_are_the_lower_bounds() -> None:
    assert requirements(low=True, torch="2.13.0")[0] == "torch==2.13.0"
    assert requirements(low=True, torch=None) == [lowest(r) for r in PROJECT["dependencies"]]
    with pytest.raises(SystemExit, match="numpy<3 has no lower bound: write it as name>=version"):
        lowest("numpy<3")
