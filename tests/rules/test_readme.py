"""The README and docs/ are correct: Python blocks run, links have targets, the site is complete.

tests/recipes/test_loops.py runs the diffs of docs/loops.md, tests/recipes/test_documents.py the
commands.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossover_ddp
from crossover_ddp._system import torch_private
from tests.harness import documents, in_ranks

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = [*[ROOT / page for page in ROOT_PAGES], *sorted((ROOT / "docs").glob("*.md"))]
# The code that documents show, and whether its model is already wrapped in DDP.
SHOWN = [
    (block, True) for path in DOCUMENTS for block in documents.blocks(path.read_text(), "python")
]
SHOWN += [(documents.after(diff), False) for diff in documents.blocks(README, "diff")]


@pytest.mark.parametrize(("source", "wrapped"), SHOWN)
@in_ranks(1)
def test_code_in_the_documentation_runs(source: str, wrapped: bool) -> None:
    """It runs where a reader would paste it: behind a model, a loader and an optimizer."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    names: dict[str, Any] = {
        "torch": torch,
        "net": network,
        "model": DistributedDataParallel(network) if wrapped else network,
        "loader": [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(3)],
        "loss_function": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
        "device": torch.device("cpu"),
        "DistributedDataParallel": DistributedDataParallel,
    }
    exec(compile(source, "README.md", "exec"), names)
    for images, labels in names["loader"]:  # the reader's loop, which stays as it is
        names["loss_function"](names["model"](images), labels).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()


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
