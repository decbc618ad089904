"""CHANGELOG.md is short, begins with the package's version, and names the replacement of each removed option."""

import re
from pathlib import Path

import crossover_ddp
from crossover_ddp.cli.output import REMOVED_OPTIONS

CHANGELOG = (Path(__file__).resolve().parents[2] / "CHANGELOG.md").read_text()


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
