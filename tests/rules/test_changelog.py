"""CHANGELOG.md is short, its version is the package's, and it says what replaces removed options.

CITATION.cff has the same version.
"""

import re
from pathlib import Path

import pytest

import crossover_ddp
from crossover_ddp.cli.output import REMOVED_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_can_be_read_at_one_sitting() -> None:
    lines = CHANGELOG.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 120] == []


def test_its_newest_section_is_the_version_of_the_package() -> None:
    assert re.findall(r"^## (\S+)", CHANGELOG, re.M)[0] == crossover_ddp.__version__


def test_it_says_what_to_do_instead_of_each_removed_option() -> None:
    """The command refers to this file when it meets one."""
    for command, options in REMOVED_OPTIONS.items():
        listed = re.search(rf"^ *- `{command}((?: --[\w-]+)+)`: \S", CHANGELOG, re.M)
        assert listed is not None, command
        assert set(listed[1].split()) == {option.split()[0] for option in options}, command


def test_the_citation_is_of_this_version_and_has_what_its_format_requires() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; timm brings it")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == crossover_ddp.__version__
    assert citation["type"] == "software"
    # Required by the schema of 1.2.0, beside cff-version. An author is a person or has a name.
    assert citation["title"] == "crossover_ddp"
    assert citation["message"]
    assert [author["name"] for author in citation["authors"]] == ["the crossover_ddp authors"]
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()
