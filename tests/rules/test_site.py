"""The site that `make docs` makes: without warnings (mkdocs.yml: of links and pages, too) and whole."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import crossover_ddp

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("material", "mkdocstrings"):
        pytest.importorskip(name, reason=f"{name} is not installed: make docs, or the extra 'docs'")
    place = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return place


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe|link rel="(?:stylesheet|icon)")[^>]*https?:[^>]*>', path.read_text()
        )
        assert loaded == [], path.name


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
