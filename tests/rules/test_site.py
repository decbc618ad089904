"""The site that `make docs` makes: without warnings, whole, and the same from files as from a server."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import crossover_ddp

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    named = set(re.findall(r": (\w+\.md)", nav))
    made = {"index.md", "contributing.md", "changes.md", "license.md"}
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")} | made


class Page(HTMLParser):
    """What a page links to, what in it can be linked to, and what a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.places |= {found.get("id", ""), found.get("name", "")}
        own = "href" in found and (tag == "a" or found.get("rel") in ("stylesheet", "icon"))
        target = found["href"] if own else found.get("src")
        if target:
            (self.links if tag == "a" else self.loaded).append(target)


def broken(site: Path) -> Iterator[str]:
    """Yield links and files that lead nowhere, as a browser sees them that has opened a file."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded:
                    yield f"{path.name}: loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = target.is_file() and (
                target not in pages or unquote(parts.fragment) in pages[target].places
            )
            if not there:
                yield f"{path.name}: {link}"


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="x"><a href="b.html#y">b</a><a href="b.html#z">b</a><a href="#x">x</a><a href="c/">c</a>'
        '<a href="https://example.com">e</a><script src="https://example.com/e.js"></script>'
    )
    (tmp_path / "b.html").write_text('<h1 id="y">')
    assert sorted(broken(tmp_path)) == [
        "a.html: b.html#z",
        "a.html: c/",
        "a.html: loads https://example.com/e.js",
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("material", "mkdocstrings"):
        pytest.importorskip(name, reason=f"{name} is not installed: make docs, or the extra 'docs'")
    place = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return place


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert list(broken(site)) == []


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    described = set(re.findall(r'id="crossover_ddp\.\w+\.(\w+)"', text))
    assert set(crossover_ddp.__all__) - described == set()
    assert {name for name in described if name.startswith("_")} == set()


def test_markdown_is_rendered(site: Path) -> None:
    """Python-Markdown is stricter than GitHub about lists and code in them."""
    for path in site.rglob("*.html"):
        text = re.sub(r"(?s)<(pre|code|script|style)\b.*?</\1>", "", path.read_text())
        left = re.findall(r"\n(?:- |\d+\. |\|)[^\n]{0,60}|\]\(\w[^\n]{0,60}|```[^\n]{0,60}|\bdef \w+\(", text)
        assert left == [], path.name
