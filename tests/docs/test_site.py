"""The documentation site: a strict build, the reference, and the pages in a real browser."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import griffe
import pytest
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from playwright.sync_api import Browser, Page
from tools.docs.hooks import COPIES, repository, site_link

from tests.helpers.browser import chromium, needs_browser

ROOT = Path(__file__).parents[2]
QUESTIONS = {  # of a new user, and the page that answers
    "own data": "study.html",
    "get the model": "how-to/get-the-model.html",
    "add a rule": "how-to/add-a-rule.html",
    "deploy": "flower.html",
    "costs": "how-to/costs.html",
    "compares": "leaderboard.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once, as `make docs` does; strict, so that every warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    # not --quiet: mkdocs does not count the warnings that it does not print
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def texts(site: Path) -> dict[str, str]:
    """The HTML of all pages by their address within the site."""
    pages = sorted(site.rglob("*.html"))
    return {page.relative_to(site).as_posix(): page.read_text() for page in pages}


def test_all_links_and_anchors_lead_somewhere(site: Path, texts: dict[str, str]) -> None:
    """Also those of raw HTML, docstrings and notebooks, which mkdocs does not check."""
    ids = {page: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for page, text in texts.items()}
    broken = []
    for page, text in texts.items():
        if page == "404.html":  # its links are absolute, for a server
            continue
        tags = "".join(re.findall(r"<[^>]+>", text))
        for url in set(re.findall(r'\b(?:href|src)="([^"]+)"', tags)):
            parts = urlsplit(unescape(url))
            if parts.scheme:
                continue
            target = urljoin(page, unquote(parts.path)) if parts.path else page
            target = target or "index.html"
            known = ids.get(target, set())
            missing = parts.fragment and not parts.fragment.startswith("__")
            if not (site / target).exists():
                broken.append(f"{page}: {url}")
            elif missing and target in ids and unquote(parts.fragment) not in known:
                broken.append(f"{page}: {url}, no such anchor")
    assert broken == []


def test_images_outside_the_docs_are_copied(site: Path, texts: dict[str, str]) -> None:
    copy = f"{COPIES}/results/leaderboard/figure.svg"
    assert f'src="{copy}"' in texts["leaderboard.html"]
    assert (site / copy).read_bytes() == (ROOT / "results/leaderboard/figure.svg").read_bytes()


def test_comments_and_formulas_are_not_shown(texts: dict[str, str]) -> None:
    for page, text in texts.items():
        shown = re.sub(r"<!--.*?-->|<(script|style|code|pre)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert "&lt;!--" not in shown, page
        assert "arithmatex" not in shown, page
        assert not re.search(r"\$[^$<>]*\\[a-z]+[^$<>]*\$", shown), page


@pytest.fixture(scope="module")
def config() -> MkDocsConfig:
    return load_config(str(ROOT / "mkdocs.yml"))


def test_links_out_of_the_docs_become_addresses(config: MkDocsConfig) -> None:
    page = File("how-to/costs.md", config.docs_dir, config.site_dir, use_directory_urls=False)
    files = Files([page])
    kept = ("https://example.org", "#memory", "../study.md#tasks")
    assert [site_link(url, page, files, config) for url in kept] == list(kept)
    source = site_link("../../README.md#use-it", page, files, config)
    assert source == f"{repository()}/blob/main/README.md#use-it"
    assert site_link("../../examples", page, files, config) == f"{repository()}/tree/main/examples"


@pytest.mark.parametrize("url", ["../../results/none.svg", "../../none.py", "../../../elsewhere"])
def test_a_link_out_of_the_docs_to_nothing_is_an_error(config: MkDocsConfig, url: str) -> None:
    page = File("how-to/costs.md", config.docs_dir, config.site_dir, use_directory_urls=False)
    with pytest.raises(PluginError, match="is not in the repository"):
        site_link(url, page, Files([page]), config)


def public_modules() -> list[str]:
    """Return the packages that list public names."""
    found = [
        p.parent for p in (ROOT / "src/fedexp").rglob("__init__.py") if "__all__" in p.read_text()
    ]
    return sorted(".".join(folder.relative_to(ROOT / "src").parts) for folder in found)


@pytest.fixture(scope="module")
def sources() -> griffe.Module:
    """The package as mkdocstrings reads it."""
    loaded = griffe.load("fedexp", search_paths=[ROOT / "src"], resolve_aliases=True)
    assert isinstance(loaded, griffe.Module)
    return loaded


def defined(sources: griffe.Module, path: str) -> griffe.Object:
    """Return what a public path stands for; a function hides a module of the same name."""
    parent, _, name = path.rpartition(".")
    member = sources[path.removeprefix("fedexp.")] if parent else sources
    target = member.final_target if isinstance(member, griffe.Alias) else member
    imported = sources[parent.removeprefix("fedexp.")] if "." in parent else sources
    hidden = imported.imports.get(name) if isinstance(imported, griffe.Module) else None
    if target.is_module and hidden and hidden != target.path:
        return defined(sources, hidden) if hidden != path else target
    return target


def public_names(sources: griffe.Module) -> dict[str, griffe.Object]:
    """Return all public names with their definitions."""
    names = {}
    for module in public_modules():
        of = sources[module.removeprefix("fedexp.")] if "." in module else sources
        for name in of.exports or ():
            names[f"{module}.{name}"] = defined(sources, f"{module}.{name}")
    return names


def test_every_public_name_is_in_the_reference(
    sources: griffe.Module, texts: dict[str, str]
) -> None:
    reference = "".join(text for page, text in texts.items() if page.startswith("reference/"))
    ids = re.findall(r'id="(fedexp(?:\.\w+)+)" class="doc', reference)
    shown = {defined(sources, each).path for each in ids}
    shown |= {path.rpartition(".")[0] for path in ids}  # a module by its members
    missing = [name for name, each in public_names(sources).items() if each.path not in shown]
    assert missing == [], "add `::: name` to a page in docs/reference"


def test_every_public_name_has_a_docstring(sources: griffe.Module) -> None:
    """Methods may have that of the method they override, or of the protocol they implement."""
    names = public_names(sources)
    assert [name for name, each in names.items() if not each.docstring] == []
    protocols = {
        member
        for each in names.values()
        if isinstance(each, griffe.Class) and any("Protocol" in str(base) for base in each.bases)
        for member, value in each.members.items()
        if value.docstring
    }
    bare = []
    for each in names.values():
        if not isinstance(each, griffe.Class):
            continue
        bases = [base for base in each.mro() if isinstance(base, griffe.Class)]
        for name, member in each.members.items():
            if name.startswith("_") or member.is_alias or name in protocols:
                continue
            if member.is_function or "property" in member.labels:
                above = (base.members.get(name) for base in bases)
                if not member.docstring and not any(b and b.docstring for b in above):
                    bare.append(member.path)
    assert bare == []


class Visitor:
    """A browser tab without a network; its requests and console messages are recorded."""

    def __init__(self, browser: Browser, allowed: str, **options: Any) -> None:
        self.context = browser.new_context(offline=allowed.startswith("file:"), **options)
        self.page = self.context.new_page()
        self.allowed = allowed
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("console", lambda message: self.messages.append(message.text))

    def close(self) -> None:
        """Check that no request left the site and that the console is empty."""
        self.context.close()
        own = (self.allowed, "data:", "blob:", "about:")
        assert self.requests
        assert [url for url in self.requests if not url.startswith(own)] == []
        assert self.messages == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def visitor(browser: Browser, site: Path) -> Iterator[Visitor]:
    """A visitor who reads the site from the file system."""
    opened = Visitor(browser, site.as_uri(), viewport={"width": 1280, "height": 900})
    yield opened
    opened.close()


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site on a server of this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def search(page: Page, words: str) -> list[str]:
    """Return the addresses of what the search field finds, best first."""
    page.locator("input.md-search__input").click()
    page.keyboard.type(words)
    # results appear while the words are typed; those of all of them name them in the address
    results = ".md-search-result__item a"
    page.locator(f"{results}[href*='h={words.lower()}']").first.wait_for(state="attached")
    return list(page.locator(results).evaluate_all("all => all.map((each) => each.href)"))


@needs_browser
def test_search_works_without_a_server(visitor: Visitor, site: Path) -> None:
    visitor.page.goto((site / "index.html").as_uri())
    found = search(visitor.page, "FedNova")
    assert any("/algorithms" in each for each in found[:3])
    assert any(each.endswith("#fedexp.fednova") for each in found)


@needs_browser
def test_search_works_on_a_server(browser: Browser, address: str) -> None:
    visitor = Visitor(browser, address)
    visitor.page.goto(f"{address}/how-to/costs.html")
    found = search(visitor.page, "fedexp.simulate")
    assert "/reference/studies.html" in found[0]
    assert any(each.endswith("#fedexp.simulate") for each in found[:3])
    visitor.close()


@needs_browser
def test_the_front_page_answers_in_one_click(visitor: Visitor, site: Path) -> None:
    for question, answer in QUESTIONS.items():
        visitor.page.goto((site / "index.html").as_uri())
        visitor.page.locator(f"article a[href='{answer}']").first.click()
        visitor.page.wait_for_url(f"**/{answer}")
        assert visitor.page.locator("article h1").is_visible(), question


@needs_browser
def test_every_section_is_a_tab(visitor: Visitor, site: Path) -> None:
    visitor.page.goto((site / "start.html").as_uri())
    tabs = [tab.strip() for tab in visitor.page.locator(".md-tabs__link").all_text_contents()]
    sections = ["Start", "Tutorials", "How-to", "Algorithms", "Reference", "Explanation", "Results"]
    assert tabs == sections
    visitor.page.locator(".md-tabs__link", has_text="Reference").click()
    visitor.page.wait_for_url("**/reference/index.html")
    visitor.page.locator("nav.md-nav--primary a", has_text="Server rules and sums").click()
    visitor.page.wait_for_url("**/reference/server-rules.html")


@needs_browser
def test_dark_mode_follows_the_system_and_the_switch(browser: Browser, site: Path) -> None:
    visitor = Visitor(browser, site.as_uri(), color_scheme="dark")
    page = visitor.page
    page.goto((site / "index.html").as_uri())
    colour = "getComputedStyle(document.body).backgroundColor"
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    dark = page.evaluate(colour)
    assert page.evaluate(scheme) == "slate"
    page.locator("label[title='Switch to light mode']").click()
    assert page.evaluate(scheme) == "default"
    assert page.evaluate(colour) != dark
    page.goto((site / "study.html").as_uri())
    assert page.evaluate(scheme) == "default"  # remembered
    visitor.close()


@needs_browser
def test_no_page_overflows_a_phone_or_asks_another_host(
    browser: Browser, site: Path, texts: dict[str, str]
) -> None:
    size = {"width": 390, "height": 844}
    visitor = Visitor(browser, site.as_uri(), viewport=size, is_mobile=True, has_touch=True)
    wide = []
    for name in texts:
        if name != "404.html":
            visitor.page.goto((site / name).as_uri())
            if visitor.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wide.append(name)
    visitor.close()
    assert wide == []


@needs_browser
def test_names_in_tables_are_not_broken(visitor: Visitor, site: Path) -> None:
    visitor.page.set_viewport_size({"width": 390, "height": 844})
    visitor.page.goto((site / "algorithms/fedexp.html").as_uri())
    codes = visitor.page.locator("article td code")
    lines = codes.evaluate_all("all => all.map((each) => each.getClientRects().length)")
    assert len(lines) > 20
    assert set(lines) == {1}
    visitor.page.goto((site / "coming-from/pfl-research.html").as_uri())
    long = visitor.page.locator("article td code.long").first
    assert long.evaluate("each => getComputedStyle(each).whiteSpace") == "normal"


@needs_browser
def test_outputs_of_notebooks_are_as_printed(visitor: Visitor, site: Path) -> None:
    visitor.page.goto((site / "tutorials/2-your-own-data-and-model.html").as_uri())
    outputs = visitor.page.locator(".jp-OutputArea-output pre")
    styles = outputs.evaluate_all("all => all.map((each) => getComputedStyle(each).whiteSpace)")
    assert set(styles) == {"pre"}
    assert not visitor.page.locator(".cell-tag").first.is_visible()
