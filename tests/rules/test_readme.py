"""The README and docs/ are correct: links have targets, the site is complete.

tests/recipes/test_snippets.py and test_loops.py run the code that they show, test_documents.py the
commands.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import crossover_ddp
from crossover_ddp._system import torch_private

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = [*[ROOT / page for page in ROOT_PAGES], *sorted((ROOT / "docs").glob("*.md"))]


def broken_links(document: Path) -> Iterator[str]:
    for link in sorted(set(re.findall(r"\]\((?!http)([^)]+)\)", document.read_text()))):
        name, _, anchor = link.partition("#")
        target = document if not name else document.parent / name
        text = target.read_text() if anchor and target.is_file() else ""
        headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
        if not target.is_file() or (anchor and anchor not in anchors):
            yield f"{document.name}: {link}"


def test_links_have_targets(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n[x](#a-b-c) [y](#nowhere) [z](page.md#a-b-c) [w](gone.md)\n")
    assert [*broken_links(page)] == ["page.md: #nowhere", "page.md: gone.md"]
    assert [link for document in DOCUMENTS for link in broken_links(document)] == []


def test_names_in_the_readme_are_public() -> None:
    mentioned = set(re.findall(r"`(crossover_\w+|[A-Z]\w*(?:State|Mutex))`", README))
    assert mentioned - {"crossover_ddp"} <= set(crossover_ddp.__all__)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. Any warning is an error, also those of links and pages (mkdocs.yml)."""
    for name in ("material", "mkdocstrings"):
        pytest.importorskip(name, reason=f"{name} is not installed: make docs, or the extra 'docs'")
    directory = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    build += ["--site-dir", str(directory)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return directory


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    remote = r'<(?:script|img|iframe|link rel="(?:stylesheet|icon)")[^>]*https?:[^>]*>'
    for path in site.rglob("*.html"):
        assert re.findall(remote, path.read_text()) == [], path.name


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    described = set(re.findall(r'id="crossover_ddp\.\w+\.(\w+)"', text))
    assert set(crossover_ddp.__all__) - described == set()
    assert {name for name in described if name.startswith("_")} == set()
    members = set(re.findall(r'id="crossover_ddp\.\w+\.\w+\.(\w+)"', text))
    assert "checkpoint" in members
    assert (
        members & {"fingerprint", "meter", "exchange", "defer", "consolidate", "for_hook"} == set()
    )


def test_the_site_lists_torchs_private_names(site: Path) -> None:
    text = (site / "compatibility.html").read_text()
    for name, value in vars(torch_private).items():
        if name.isupper() and not isinstance(value, float):
            values = [value] if isinstance(value, str) else [*value]
            assert [each for each in values if f"<code>{each}</code>" not in text] == [], name
    for purpose in ("_get_process_group_store", "_zeropower_via_newtonschulz"):
        assert f"<code>{purpose}</code>" in text


def test_markdown_is_rendered(site: Path) -> None:
    """Python-Markdown is stricter than GitHub about lists, and about code in them."""
    for path in site.rglob("*.html"):
        text = re.sub(r"(?s)<(pre|code|script|style)\b.*?</\1>", "", path.read_text())
        left = re.findall(
            r"\n(?:- |\d+\. |\|)[^\n]{0,60}|\]\(\w[^\n]{0,60}|```[^\n]{0,60}|\bdef \w+\(", text
        )
        assert left == [], path.name


def test_the_readme_shows_the_output_of_advise_that_its_page_explains() -> None:
    page = (ROOT / "docs" / "command.md").read_text().splitlines()
    shown = re.findall(
        r"^    (?:a step|N/C|what  |crossover |decoupled |torch's |a codec).*$", README, re.M
    )
    assert len(shown) == 7
    assert [line for line in shown if line not in page] == []


def test_the_readme_comes_to_the_point() -> None:
    """A reader must find the install line and the table of jobs within a minute or two."""
    text = re.sub(r"\]\([^)]*\)", "]", README)
    assert len(README.splitlines()) <= 90
    assert len(text.partition("    pip install")[0].split()) <= 120
    assert len(text.partition("\n| your job")[0].split()) <= 350
