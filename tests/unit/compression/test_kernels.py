"""The fused passes of the codecs write the bits of the plain form, and are compiled only once."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._compression import coded_link, compiled, kernels
from crossover_ddp._compression.codec import Scratch
from crossover_ddp._compression.coded_link import Part, _Tile
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Run
from crossover_ddp.codecs import Codec, Half, Int4, Int8, SIDCo
from tests.harness import in_ranks
from tests.harness.training import Training

CPU = torch.device("cpu")
CODECS: list[Codec] = [Int8(), Int8(48), Int4(), Int4(8), Half()]
needs_a_compiler = pytest.mark.skipif(
    compiled.load() is None,
    reason="needs a C compiler: install gcc or clang, or name one in CC",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the kernels an empty cache directory, in which they are looked for again."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    compiled.load.cache_clear()
    yield tmp_path / "crossover_ddp"
    compiled.load.cache_clear()


def tile_of(
    numels: Sequence[int], exact: Sequence[int], multiple: int, keeps: bool
) -> tuple[_Tile, int]:
    """Return a tile with gaps between its spans in the bucket, and the bucket's length."""
    coded, plain = [], []
    start = 3
    for numel in numels:
        parameter = torch.empty((numel, 1), device="meta")
        coded.append(Run(parameter, 0, Span(start, start + numel)))
        start += numel + 1
    for numel in exact:
        plain.append(Span(start, start + numel))
        start += numel + 2
    return _Tile(Part(coded, plain), multiple, CPU, keeps, Scratch()), start


def passes(tile: _Tile, flats: Sequence[torch.Tensor], codec: Codec) -> list[torch.Tensor]:
    """Return the bits of all that a tile writes in two exchanges."""
    written = []
    memory = torch.zeros(-(-tile.message_bytes(codec) // 16) * 16, dtype=torch.uint8)
    message = tile.message(memory[: tile.message_bytes(codec)], codec)
    for flat in flats:
        tile.encode(flat, tile.in_bucket, message)
        mean, sums = flat.clone(), torch.ones(tile.numel)
        tile.read([message, message], mean, torch.tensor(3.0))
        tile.add_decoded(message, sums)
        packed = torch.empty(tile.numel)
        tile.pack(flat, packed)
        again = tile.message(torch.zeros_like(memory)[: tile.message_bytes(codec)], codec)
        tile.encode(packed, tile.in_values, again)
        decoded = torch.zeros_like(flat)
        tile.read([again], decoded)
        added = torch.cat([sums[slice(*span)] for span in tile.in_values.spans])
        for values in (memory, mean, added, tile.residual, decoded):
            written.append(values.clone().view(torch.uint8))
    return written


@needs_a_compiler
@given(
    codec=st.sampled_from(CODECS),
    numels=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    exact=st.lists(st.integers(1, 9), max_size=2),
    exponents=st.tuples(st.integers(-45, 38), st.integers(-45, 38)),
    special=st.sampled_from([None, torch.nan, torch.inf, -torch.inf, 3.4e38, -0.0]),
    keeps=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_fused_and_plain_passes_write_the_same_bits(
    codec: Codec,
    numels: list[int],
    exact: list[int],
    exponents: tuple[int, int],
    special: float | None,
    keeps: bool,
    seed: int,
) -> None:
    """NaNs are compared as NaNs, since a processor may choose among their bits."""
    generator = torch.Generator().manual_seed(seed)
    multiple = codec.multiple * (1 + seed % 2)
    found = []
    for form in (kernels.kernel_of, lambda codec: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coded_link, "kernel_of", form)
            tile, length = tile_of(numels, exact, multiple, keeps)
            flats = []
            for exponent in exponents:
                flat = torch.randn(length, generator=generator.manual_seed(seed + exponent))
                flat *= 10.0**exponent
                if seed % 3 == 0:  # an unused parameter, in one of the exchanges
                    flat[3 : 3 + numels[0]] = 0
                flats.append(flat)
            if special is not None:
                flats[seed % 2][seed % length] = special
            found.append(passes(tile, flats, codec))
    for fused, plain in zip(*found, strict=True):
        if len(fused) % 4 == 0:
            fused, plain = fused.view(torch.float32), plain.view(torch.float32)
            assert torch.equal(fused.isnan(), plain.isnan())
            fused, plain = fused.nan_to_num(7.0), plain.nan_to_num(7.0)
            fused, plain = fused.view(torch.uint8), plain.view(torch.uint8)
        assert torch.equal(fused, plain)


def test_other_codecs_have_only_a_plain_form() -> None:
    class Mine(Int8):
        """A user's own variant."""

    for codec in (Half(torch.float16), SIDCo(0.1), Mine()):
        assert kernels.kernel_of(codec) is None


@needs_a_compiler
def test_kernels_are_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.load() is not None
    assert len([*cache.glob("*")]) == 1  # nothing else is left there
    compiled.load.cache_clear()

    def run(*arguments: Any, **options: Any) -> None:
        raise AssertionError("compiled twice")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", run)
        assert compiled.load() is not None


@needs_a_compiler
def test_kernels_that_cannot_be_loaded_are_compiled_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled.load()
    (kept,) = cache.glob("*")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "other"))
    broken = tmp_path / "other/crossover_ddp" / kept.name
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"cut off")
    compiled.load.cache_clear()
    assert compiled.load() is not None
    assert broken.stat().st_size == kept.stat().st_size


@needs_a_compiler
def test_another_processor_has_its_own_kernels(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled.load()
    monkeypatch.setattr(compiled, "_processor", lambda: "flags: none")
    compiled.load.cache_clear()
    compiled.load()
    assert len([*cache.glob("*.so")]) == 2


@needs_a_compiler
def test_a_cache_that_cannot_be_written_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "file"))
    compiled.load.cache_clear()
    assert compiled.load() is not None
    compiled.load.cache_clear()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_log_says_that_passes_are_plain(
    compiler: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.INFO):
        assert compiled.load() is None
    assert compiler in caplog.text
    assert "plain form" in caplog.text
    assert kernels.kernel_of(Int8()) is None


@needs_a_compiler
@in_ranks(2)
def test_ranks_with_and_without_a_compiler_agree(rank: int, world_size: int) -> None:
    """`Training` compares the parameters of the ranks itself."""
    if rank == 1:
        os.environ["CC"] = "no-such-compiler"
    compiled.load.cache_clear()
    assert (compiled.load() is None) == (rank == 1)
    Training("int8", rank).run(6).close()
    os.environ.pop("CC", None)
    compiled.load.cache_clear()


@needs_a_compiler
def test_importing_the_package_compiles_nothing(tmp_path: Path) -> None:
    code = "import crossover_ddp; crossover_ddp.AutoState, crossover_ddp.Int8()"
    environment = {**os.environ, "XDG_CACHE_HOME": os.fspath(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert [*tmp_path.iterdir()] == []
