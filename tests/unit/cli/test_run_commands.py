"""Commands of `crossover-ddp run`: how they are read, what is refused before anything starts."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp.cli.run.commands import (
    CommandError,
    default_name,
    from_groups,
    from_lines,
    named,
    shell_syntax,
    split_groups,
)

# What can be a program's argument.
WORDS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1
).filter(lambda words: words[0] != "" and "=" not in words[0])


def test_every_double_dash_begins_a_command() -> None:
    options, groups = split_groups(["run", "--json", "--", "a b", "--", "c", "d"])
    assert options == ["run", "--json"]
    assert groups == [["a b"], ["c", "d"]]
    assert split_groups(["run"]) == (["run"], [])


def test_one_text_is_cut_into_words_and_several_words_stay() -> None:
    first, second = named(from_groups([["train.py --name 'a b'"], ["train.py", "a b", "$HOME;"]]))
    assert (first.name, first.words) == ("a", ("train.py", "--name", "a b"))
    assert (second.name, second.words) == ("b", ("train.py", "a b", "$HOME;"))


def test_variables_before_a_command_are_its_own() -> None:
    (command,) = named(from_groups([["LR=0.1 EMPTY= torchrun x.py --a=b"]]))
    assert command.environment == {"LR": "0.1", "EMPTY": ""}
    assert command.words == ("torchrun", "x.py", "--a=b")


@settings(deadline=None)
@given(WORDS)
def test_quoted_words_come_back(words: list[str]) -> None:
    (entry,) = from_groups(
        [
            [
                shlex.join(words),
            ]
        ]
    )
    assert entry.words == words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a | b", "|"),
        ("a && b", "&"),
        ("a > log", ">"),
        ("a $HOME", "$"),
        ('a "$HOME"', "$"),
        ("a `b`", "`"),
        ("a ~/data", "~"),
        ("a 'b' $c", "$"),
        ("a '$HOME; ~/x' \\$b \\; c~d", None),
        ('a ";|" "it\'s" x=[1,2] *.tar shard-{0..9}', None),
        ("a # $b", None),
        ("a b#$c", "$"),
    ],
)
def test_what_only_a_shell_understands_is_found(text: str, found: str | None) -> None:
    assert shell_syntax(text) == found


def test_lines_have_comments_and_may_be_continued() -> None:
    entries = from_lines("# a sweep\n\ntrain.py --lr 0.1  # low\n  \ntrain.py \\\n  --lr 0.2\n")
    assert [entry.words for entry in entries] == [["train.py", "--lr", "0.1"], ["train.py", "--lr", "0.2"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x 'open", "line 2: expected closed quotes"),
        ("A=1", "line 2: expected a command"),
        ("x; y", "line 2: expected a command without shell syntax, got ';'"),
    ],
)
def test_lines_that_are_no_commands_are_refused(text: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        from_lines(f"good\n{text}\n")


def test_default_names_go_on_after_z() -> None:
    assert [default_name(index) for index in (0, 1, 25, 26, 51, 52, 701, 702)] == [
        *("a", "b", "z", "aa", "az", "ba", "zz", "aaa"),
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["one"], "one --name per command, got 1 for 2"),
        (["one", "one"], "got 'one' twice"),
        (["one", ".."], "got '..'"),
        (["one", "a/b"], "got 'a/b'"),
    ],
)
def test_names_that_cannot_be_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        named(from_groups([["x"], ["y"]]), names)


def test_no_command_at_all_is_refused() -> None:
    with pytest.raises(CommandError, match="got none"):
        named([])
