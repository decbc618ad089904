"""Lines of jobs: however they arrive, whole and each by itself."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp.cli.run.lines import Lines, prefix


def fed(*chunks: bytes, limit_bytes: int = 1 << 16) -> list[bytes]:
    lines = Lines(limit_bytes)
    return [line for chunk in chunks for line in lines.feed(chunk)] + lines.rest()


@settings(deadline=None)
@given(st.binary(), st.lists(st.integers(0, 100), max_size=8))
def test_it_does_not_matter_how_bytes_arrive(data: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[begin:end] for begin, end in itertools.pairwise(places)]
    assert fed(*chunks) == fed(data)


@settings(deadline=None)
@given(
    st.lists(st.binary().filter(lambda line: not set(line) & set(b"\r\n"))), st.sampled_from([b"\n", b"\r\n"])
)
def test_whole_lines_come_as_they_are(texts: list[bytes], end: bytes) -> None:
    assert fed(b"".join(text + end for text in texts)) == texts


def test_a_last_line_needs_no_end() -> None:
    assert fed(b"one\ntwo") == [b"one", b"two"]
    assert fed(b"one\n") == [b"one"]


@settings(deadline=None)
@given(st.binary(min_size=1).filter(lambda line: not set(line) & set(b"\r\n")), st.integers(1, 10))
def test_a_very_long_line_comes_in_pieces_and_nothing_is_lost(text: bytes, limit_bytes: int) -> None:
    lines = Lines(limit_bytes)
    pieces = [piece for byte in text for piece in lines.feed(bytes([byte]))]
    assert all(len(piece) == limit_bytes for piece in pieces)
    assert b"".join(pieces + lines.rest()) == text


def test_of_a_progress_bar_the_last_state_is_kept() -> None:
    assert fed(b"\r 0%", b"\r50%", b"\r100%\ndone\n") == [b"100%", b"done"]
    assert fed(b"bar\r    \r\nnext\n") == [b"next"]


def test_a_progress_bar_is_told_once_per_state() -> None:
    lines = Lines()
    assert lines.feed(b"plain, not over yet") == []
    assert lines.overwriting() is None
    assert lines.feed(b"\r10%") == []
    assert lines.overwriting() == b"10%"
    assert lines.overwriting() is None
    assert lines.feed(b"\r20%\r30%\r") == []
    assert lines.overwriting() == b"30%"
    assert lines.feed(b"\rend\n") == [b"end"]
    assert lines.feed(b"plain") == []
    assert lines.overwriting() is None


def test_prefixes_are_aligned_and_coloured_only_if_asked() -> None:
    assert prefix("a", 3, None) == b"a   | "
    assert prefix("low", 3, 0) == b"\x1b[36mlow | \x1b[0m"
    assert prefix("a", 1, 10) == prefix("a", 1, 0)
