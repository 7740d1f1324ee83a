"""Hooks of mkdocs: wildcards in the navigation, links out of docs/, tables, formulas, notebooks.

The pages are written for GitHub as well: links to files outside docs/ are relative, and formulas
are LaTeX between dollars. On the site, an image outside docs/ is copied, any other file becomes a
link to the repository, and formulas become MathML, for which a page needs no script.
"""

from __future__ import annotations

import html
import posixpath
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Markdown  # type: ignore[import-untyped]
from markdown.extensions import Extension  # type: ignore[import-untyped]
from markdown.treeprocessors import Treeprocessor  # type: ignore[import-untyped]
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[2]
IMAGES = (".svg", ".png", ".gif", ".jpg")
COPIES = "assets/repository"  # where images from outside docs/ are in the site
PROSE, LONG_CODE = 48, 36  # characters from which a cell is a sentence, and code may be wrapped


@cache
def repository() -> str:
    """Return the address of the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["urls"]["Source"])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand wildcards in `nav`, and add what depends on the repository."""
    docs = Path(config.docs_dir)
    config.nav = _expanded(config.nav or [], docs)
    config.markdown_extensions.append(SiteElements())
    link = {"icon": "fontawesome/brands/github", "link": repository(), "name": "Repository"}
    config.extra["social"] = [link]  # repo_url would make the theme ask GitHub for stars
    return config


def _expanded(entries: list[Any], docs: Path) -> list[Any]:
    """Return the entries of a navigation with wildcards replaced; sections without pages go.

    >>> _expanded(["index*.md", {"None": ["none/*.md"]}], ROOT / "docs")
    ['index.md']
    """
    named = {entry for entry in _names(entries) if "*" not in entry}
    result: list[Any] = []
    for entry in entries:
        title, value = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(value, str) and "*" in value:
            found = (path.relative_to(docs).as_posix() for path in docs.glob(value))
            pages = (page for page in found if page not in named)
            value = sorted(pages, key=lambda page: page.rpartition(".")[0])  # a.md before a-b.md
            if title is None:
                result += value
                continue
            value.sort(key=lambda page: not page.endswith("/index.md"))  # the section's own page
        elif isinstance(value, list):
            value = _expanded(value, docs)
        if value:
            result.append(value if title is None else {title: value})
    return result


def _names(entries: list[Any]) -> list[str]:
    values = [v for e in entries for v in (e.values() if isinstance(e, dict) else [e])]
    return [value for value in values if isinstance(value, str)]


class SiteElements(Extension):  # type: ignore[misc]
    """A Markdown extension for links that leave docs/, before mkdocs resolves them, and cells."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_Links(md), "repository", 1)
        md.treeprocessors.register(_Cells(md), "cells", 2)


class _Links(Treeprocessor):  # type: ignore[misc]
    def run(self, root: Element) -> None:
        resolver: Any = self.md.treeprocessors["relpath"]  # which has the page and all files
        for element in root.iter():
            name = {"a": "href", "img": "src"}.get(element.tag)
            url = element.get(name) if name else None
            if name and url:
                element.set(name, site_link(url, resolver.file, resolver.files, resolver.config))


class _Cells(Treeprocessor):  # type: ignore[misc]
    """Mark long cells and long code in tables for site.css."""

    def run(self, root: Element) -> None:
        for cell in root.iter("td"):
            if len("".join(cell.itertext())) >= PROSE:
                cell.set("class", "prose")
            for code in cell.iter("code"):
                if len("".join(code.itertext())) >= LONG_CODE:
                    code.set("class", "long")


def site_link(url: str, page: File, files: Files, config: MkDocsConfig) -> str:
    """Return a link of a page; where it leaves docs/, one that is valid on the site.

    An image becomes a file of the site, relative to the page's source as mkdocs expects, another
    file or folder an address in the repository. One that does not exist is an error.
    """
    parts = urlsplit(url)
    if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
        return url
    folder = Path(config.docs_dir, page.src_uri).parent
    target = Path(posixpath.normpath((folder / unquote(parts.path)).as_posix()))
    if target.is_relative_to(config.docs_dir):
        return url
    if not target.is_relative_to(ROOT) or not target.exists():
        raise PluginError(f"{page.src_uri} links to {url}, which is not in the repository")
    name = target.relative_to(ROOT).as_posix()
    if target.suffix in IMAGES:
        copy = f"{COPIES}/{name}"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(target)))
        return posixpath.relpath(copy, posixpath.dirname(page.src_uri) or ".")
    kind = "tree" if target.is_dir() else "blob"
    return f"{repository()}/{kind}/main/{name}" + (f"#{parts.fragment}" if parts.fragment else "")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with MathML for its formulas; a notebook also with links of the site."""
    if page.file.src_uri.endswith(".ipynb"):
        return _notebook(html, page, config, files)
    return FORMULA.sub(_mathml, html)


FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
CELL = re.compile(
    r'(?P<open><div class="jp-RenderedHTMLCommon jp-RenderedMarkdown[^>]*>)(?P<text>.*?)'
    r"(?=</div>\s*</div>\s*</div>)",
    re.DOTALL,
)
DOLLARS = re.compile(
    r"(?P<code><(?P<tag>code|pre)\b.*?</(?P=tag)>)|(?P<d>\$\$?)(?P<tex>[^$]+)(?P=d)", re.DOTALL
)
REDRAWN = {  # what latex2mathml writes, and what most fonts draw better
    '<mo stretchy="true">&#x000AF;</mo>': '<mo stretchy="false">&#x02015;</mo>',  # of \bar
    "<mo>&#x02016;</mo>": '<mo stretchy="false">&#x02016;</mo>',  # of \lVert
}
LINK = re.compile(r'(?P<name>\b(?:href|src))="(?P<url>[^"#:]+)(?P<anchor>#[^"]*)?"')


def _mathml(match: re.Match[str]) -> str:
    return mathml(html.unescape(match["tex"]), block=match["tag"] == "div")


def mathml(tex: str, block: bool) -> str:
    """Return a formula as MathML.

    >>> mathml("x^2", block=False)[:60]
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="in'
    """
    try:
        math = convert(tex.strip(), display="block" if block else "inline")
    except Exception as error:
        raise PluginError(f"not a formula that latex2mathml knows: {tex!r}") from error
    for written, drawn in REDRAWN.items():
        math = math.replace(written, drawn)
    return f'<div class="math-block">{math}</div>' if block else math


def _notebook(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a notebook's page: without MathJax and Mermaid, which come from a CDN."""
    content = re.sub(
        r"<script src=\"\"></script>|<script\b(?:(?!</script>).)*?(?:mathjax|mermaid).*?</script>",
        "",
        content,
        flags=re.DOTALL | re.IGNORECASE,
    )

    def formula(match: re.Match[str]) -> str:
        if match["code"]:
            return match["code"]
        return mathml(html.unescape(match["tex"]), block=match["d"] == "$$")

    def link(match: re.Match[str]) -> str:
        url = site_link(match["url"], page.file, files, config)
        if not urlsplit(url).scheme:
            folder = posixpath.dirname(page.file.src_uri)
            target = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, url)))
            if target is None:
                raise PluginError(f"{page.file.src_uri} links to {url}, which is not in docs/")
            url = get_relative_url(target.url, page.url)
        return f'{match["name"]}="{url}{match["anchor"] or ""}"'

    def cell(match: re.Match[str]) -> str:
        return match["open"] + LINK.sub(link, DOLLARS.sub(formula, match["text"]))

    return CELL.sub(cell, content)
