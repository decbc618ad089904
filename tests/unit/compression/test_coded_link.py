"""One bucket's messages, with all ranks in one process, on a device as on the host."""

import asyncio
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossover_ddp._compression import coded_link, compiled
from crossover_ddp._compression.codec import CodecChoice, Scratch, codecs_of
from crossover_ddp._compression.coded_link import OneHopLink, OwnersLink, parts_of, suits_one_hop
from crossover_ddp._ddp.layout import spans_of
from crossover_ddp._engine.buckets import Run
from crossover_ddp.codecs import Codec, Half, Int4, Int8, PerPair, SIDCo
from tests.multiprocess.identity_codec import Identity

# A large matrix, a bias, a matrix, a bias, and a matrix smaller than a block.
SHAPES = [(40000, 1), (50,), (3000, 1), (20,), (7, 1)]
NUMELS = [shape[0] for shape in SHAPES]
CPU = torch.device("cpu")
PAIRS: list[tuple[Codec | PerPair, Codec]] = [
    (Int8(), Int8()),
    (Int8(64), Half()),
    (Int4(), Int8()),
    (Half(torch.float16), Int8(100)),
    (Half(), Half()),
    (PerPair.by_node([0, 1, 1], far=Int8()), Int8()),
]


@pytest.fixture(params=["fused", "plain"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with fused passes, where the machine has a compiler, and with plain ones."""
    if request.param == "plain":
        monkeypatch.setattr(coded_link, "kernel_of", lambda codec: None)
    elif compiled.load() is None:
        pytest.skip("needs a C compiler: install gcc or clang, or name one in CC")


# By number of the exchange, sender and receiver.
Mail = Mapping[tuple[int, int, int], asyncio.Future[torch.Tensor]]


class InOneProcess:
    """A rank's link, with the collectives that codecs call. Ranks are tasks of one event loop."""

    def __init__(self, rank: int, size: int, mail: Mail, in_program_order: bool) -> None:
        self.rank = rank
        self.size = size
        self.in_program_order = in_program_order
        self._mail = mail
        self._calls = 0

    async def _exchanged(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
    ) -> None:
        """Send a tensor to each other rank and receive one; ``incoming[self.rank]`` stays."""
        others, number = [rank for rank in range(self.size) if rank != self.rank], self._calls
        self._calls += 1
        for other in others:
            self._mail[number, self.rank, other].set_result(outgoing[other].clone())
        for other in others:
            incoming[other].copy_(await self._mail[number, other, self.rank])

    async def reduce_scatter(self, flat: torch.Tensor, layout: Sequence[int]) -> torch.Tensor:
        parts = flat.split(list(layout))
        addends = [parts[self.rank].clone() for _ in layout]
        await self._exchanged(parts, addends)
        return parts[self.rank].copy_(torch.stack(addends).mean(0))

    async def all_gather(self, flat: torch.Tensor, layout: Sequence[int]) -> None:
        parts = flat.split(list(layout))
        await self._exchanged([parts[self.rank]] * self.size, parts)

    async def all_to_all(
        self, outgoing: Any, to: Sequence[int], incoming: Any, of: Sequence[int]
    ) -> None:
        await self._exchanged(outgoing.split(list(to)), incoming.split(list(of)))

    async def compute(self) -> None:
        """Nothing to wait for."""


class Ranks:
    """All ranks of one bucket. Owners with work double the mean."""

    def __init__(
        self, codec: CodecChoice, world_size: int, device: torch.device = CPU, **options: Any
    ) -> None:
        equal = sum(NUMELS) // world_size
        self.layout = [equal] * (world_size - 1) + [sum(NUMELS) - equal * (world_size - 1)]
        parameters = [torch.empty(shape, device="meta") for shape in SHAPES]
        runs = [
            Run(p, 0, span) for p, span in zip(parameters, spans_of(tuple(NUMELS)), strict=True)
        ]
        one_hop = options.pop("one_hop", False)
        self.parts = parts_of(runs, [sum(NUMELS)] if one_hop else self.layout)
        kind = OneHopLink if one_hop else OwnersLink
        self.has_work = bool(options.get("has_work"))
        self.by_collectives = options.pop("by_collectives", False)
        each = codecs_of(codec), parameters, self.parts, device, Scratch()
        self.coded: list[Any] = [kind(link, *each, **options) for link in self._links()]

    def _links(self) -> list[Any]:
        mail: Any = defaultdict(lambda: asyncio.get_running_loop().create_future())
        size = len(self.layout)
        return [InOneProcess(rank, size, mail, self.by_collectives) for rank in range(size)]

    def step(self, flats: Sequence[torch.Tensor], *, drained: bool = False) -> None:
        """Replace each rank's gradient by the mean."""
        kept = self.residuals() if drained else []

        async def journey(rank: int, link: Any) -> None:
            coded, flat = self.coded[rank], flats[rank]
            if drained:  # as `Compression` adds residuals that it has set aside
                flat.add_(kept[rank])
                coded.drained(link)
            else:
                coded.encode(flat, link)
            if not self.has_work:
                await coded.all_reduce(flat, self.layout)
                return
            own = await coded.reduce_scatter(flat, self.layout)
            own.mul_(2)
            await coded.all_gather(flat, self.layout)

        async def run() -> None:
            journeys = (journey(rank, link) for rank, link in enumerate(self._links()))
            await asyncio.wait_for(asyncio.gather(*journeys), 60)

        asyncio.run(run())

    def residuals(self) -> list[torch.Tensor]:
        """Return each rank's residuals, as long as a gradient."""
        found = []
        for coded in self.coded:
            kept = {id(parameter): residual.cpu() for parameter, residual in coded.residuals()}
            empty = zip(coded.parameters, map(torch.zeros, NUMELS), strict=True)
            found.append(torch.cat([kept.get(id(parameter), zeros) for parameter, zeros in empty]))
        return found


def gradients(world_size: int, step: int, device: torch.device = CPU) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(sum(NUMELS), generator=generator).pow(3).to(device) for _ in range(world_size)
    ]


def per_pair(*nodes: int) -> tuple[PerPair, Codec]:
    return PerPair.by_node(nodes, far=Int8()), Int8()


EACH_WAY = tuple([tuple([codec] * 3) for codec in (None, Half(), Int8())])
CHOICES: list[CodecChoice] = [Int8(), Half(), Int4(), SIDCo(0.05), (SIDCo(0.05), Int8(100))]


@pytest.mark.parametrize(
    ("codec", "world_size", "one_hop"),
    [
        *((codec, size, False) for codec in CHOICES for size in (2, 3, 4)),
        *((codec, 2, True) for codec in CHOICES[:4]),
        *(
            (per_pair(*nodes), len(nodes), False)
            for nodes in ((0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1))
        ),
        ((PerPair(EACH_WAY), Int8()), 3, False),
    ],
    ids=repr,
)
def test_applied_means_and_residuals_add_up_to_all_gradients(
    codec: CodecChoice, world_size: int, one_hop: bool
) -> None:
    ranks = Ranks(codec, world_size, one_hop=one_hop)
    missing = torch.zeros(sum(NUMELS), dtype=torch.float64)
    for step in range(6):
        flats = gradients(world_size, step)
        missing += torch.stack(flats).double().mean(0)
        ranks.step(flats)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        missing -= flats[0]
    kept = ranks.residuals()
    assert all(bool(each.any()) for each in kept)
    missing -= torch.stack(kept).double().mean(0)
    assert float(missing.abs().max()) < 1e-4


@pytest.mark.parametrize("world_size", [3, 4])
def test_owners_add_in_the_order_of_ranks(world_size: int) -> None:
    """Two ranks' sum has one result, so it is the third addend that shows the order."""
    flats = gradients(world_size, 0)
    expected = functools.reduce(torch.add, flats).div(torch.tensor(float(world_size)))
    Ranks(Identity(), world_size).step(flats)
    assert all(torch.equal(flat, expected) for flat in flats)


def rounded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return what ``codec`` makes of one parameter's values."""
    padding = -len(values) % codec.multiple
    padded = torch.cat([values, torch.zeros(padding)])
    message = torch.zeros(codec.nbytes(len(padded)), dtype=torch.uint8)
    codec.encode(padded, message, torch.zeros_like(padded))
    codec.add_decoded(message, decoded := torch.zeros_like(padded))
    return decoded[: len(values)]


@pytest.mark.parametrize("codec", CHOICES[:2], ids=repr)
def test_in_one_hop_two_ranks_round_each_gradient_once(codec: Any) -> None:
    """Each sends as many bytes as it would to the owner and from the owner."""
    ranks = Ranks(codec, 2, one_hop=True)
    flats = gradients(2, 0)
    expected = torch.cat(
        [
            sum([rounded(codec, part) if len(shape) > 1 else part for part in parts]) / 2  # type: ignore[arg-type]
            for shape, *parts in zip(SHAPES, *[flat.split(NUMELS) for flat in flats], strict=True)
        ]
    )
    ranks.step(flats)
    assert all(torch.equal(flat, expected) for flat in flats)
    for one, both in zip(ranks.coded, Ranks(codec, 2).coded, strict=True):
        assert one.sent_bytes() == pytest.approx(both.sent_bytes(), rel=0.03)


def test_one_hop_suits_two_ranks_with_one_codec() -> None:
    far = per_pair(0, 1)
    near = PerPair.by_node([0, 1], far=Half()), Int8()
    assert suits_one_hop(codecs_of(Int8()), 2)
    assert suits_one_hop(codecs_of((Int8(64), Int8(64))), 2)
    assert not suits_one_hop(codecs_of((Int8(64), Int8())), 2)
    assert not suits_one_hop(codecs_of(Int8()), 3)
    assert not suits_one_hop(codecs_of(far), 2), "what a rank keeps for itself is not coded"
    assert not suits_one_hop(codecs_of(near), 2)


@pytest.mark.parametrize("one_hop", [False, True])
@pytest.mark.parametrize("codec", [Half(), Int4(), Int8(), Int8(100), Int8(7000)], ids=repr)
def test_tiles_do_not_change_a_bit(
    codec: Codec, one_hop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 4096 values is shorter than the longest parameter, and than a block of 7000."""
    whole = Ranks(codec, 2, one_hop=one_hop)
    monkeypatch.setattr(coded_link, "_TILE_NUMEL", 1 << 12)
    cut = Ranks(codec, 2, one_hop=one_hop)
    assert len(whole.coded[0]._tiles[0]) == 1 < len(cut.coded[0]._tiles[0])
    for step in range(3):
        expected, found = gradients(2, step), gradients(2, step)
        whole.step(expected)
        cut.step(found)
        assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, cut.residuals(), whole.residuals()))


def test_a_codec_that_looks_at_all_values_gets_them_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coded_link, "_TILE_NUMEL", 1 << 12)
    for codec in (SIDCo(0.05), (Int8(), SIDCo(0.05))):
        assert [len(tiles) for tiles in Ranks(codec, 2).coded[0]._tiles] == [1, 1]


@dataclass(frozen=True)
class Inexact(Identity):
    """Identity whose sums depend on the order: it forgets the last bits of what it adds to."""

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(out.bfloat16()).add_(message.view(torch.float32))


def test_in_one_hop_both_ranks_add_in_the_same_order() -> None:
    flats = gradients(2, 0)
    Ranks(Inexact(), 2, one_hop=True).step(flats)
    assert torch.equal(*flats)


@dataclass(frozen=True)
class Aligned(Identity):
    """Identity that checks where messages begin."""

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        assert message.data_ptr() % 16 == 0
        super().encode(values, message, residual)


@pytest.mark.parametrize("by_collectives", [False, True])
def test_messages_are_aligned(by_collectives: bool) -> None:
    """For codecs at 16 bytes, behind exact values as well; each rank's share for NCCL at 128."""
    # Parts of equal length have messages of other lengths, since runs are padded to blocks.
    ranks = Ranks((Aligned(), Int8()), 3, by_collectives=by_collectives)
    ranks.step(gradients(3, 0))
    for link in ranks.coded:
        for buffer in (link._outgoing, link._incoming, link._gathered):
            assert all(nbytes % (128 if by_collectives else 16) == 0 for nbytes in buffer.layout)
        assert not by_collectives or len({*link._gathered.layout}) == 1, "all-gather of NCCL"


def test_messages_to_near_ranks_are_not_coded() -> None:
    ranks = Ranks(per_pair(0, 0, 1), 3)
    ranks.step(gradients(3, 0))
    near, _, far = [len(link._outgoing.tensor) for link in ranks.coded]
    assert 2 * 0.254 < far / (4 * NUMELS[0] / 3) < 0.6 < 1.2 < near / (4 * NUMELS[0] / 3)


def check_bits(codecs: CodecChoice, world_size: int, device: torch.device) -> None:
    """Compare means and residuals with those of a bucket on gloo, bit by bit."""
    ranks = Ranks(codecs, world_size, device, by_collectives=True)
    reference = Ranks(codecs, world_size)
    for step in range(5):
        found = gradients(world_size, step, device)
        expected = gradients(world_size, step)
        ranks.step(found)
        reference.step(expected)
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got.cpu(), wanted)
    for got, wanted in zip(ranks.residuals(), reference.residuals(), strict=True):
        assert bool(wanted.any())
        assert torch.equal(got, wanted)


def check_infinities(codecs: CodecChoice, bad: float, device: torch.device) -> None:
    """One rank's value makes its owner's coded part NaN on all ranks, and enters no residual."""
    ranks = Ranks(codecs, 3, device)
    ranks.step(gradients(3, 0, device))
    before = ranks.residuals()
    flats = gradients(3, 1, device)
    owner = 0
    flats[1][10] = bad
    ranks.step(flats)
    for flat in flats:
        assert all(bool(flat[slice(*each.span)].isnan().all()) for each in ranks.parts[owner].coded)
    after = ranks.residuals()
    assert all(bool(residual.isfinite().all()) for residual in after)
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True)), (
        "the residuals of other messages change"
    )
    ranks.step(found := gradients(3, 2, device))
    assert all(bool(flat.isfinite().all()) for flat in found)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("codecs", [*PAIRS[:4], (SIDCo(0.05), Int8())], ids=repr)
def test_infinities_reach_all_ranks_and_no_residual(codecs: CodecChoice, bad: float) -> None:
    check_infinities(codecs, bad, CPU)


@pytest.mark.parametrize("codec", [Int8(), Identity()], ids=repr)
def test_the_result_of_an_owners_work_reaches_all_ranks(codec: Codec) -> None:
    """It is twice the mean, rounded twice; an exact step brings the difference."""
    ranks = Ranks(codec, 3, has_work=True)
    missing = torch.zeros(sum(NUMELS))
    steps = 4
    exact = torch.cat([torch.full((shape[0],), len(shape) == 1) for shape in SHAPES])
    for step in range(steps):
        flats = gradients(3, step)
        wanted = 2 * torch.stack(flats).mean(0)
        ranks.step(flats, drained=step == steps - 1)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        assert torch.allclose(flats[0][exact], wanted[exact], atol=1e-6)
        missing += wanted - flats[0]
        is_rounded = codec != Identity() and step < steps - 1
        assert bool(missing.abs().max() > 1e-3) == is_rounded


def test_an_object_that_is_no_codec_is_refused() -> None:
    # Older versions asked codecs for `room`.
    former = SimpleNamespace(room=len, encode=len, add_decoded=len)
    for wrong, found in (
        (former, "codec=namespace.* without nbytes, encode, add_decoded"),
        ((Int8(), Half), "codec=<class"),
        (("int8", Int8()), "codec='int8'"),
        ((Int8(), Int8(), Int8()), r"codec=\(Int8\(block=256\), Int8"),
        ((Int8(), PerPair.by_node([0, 1], far=Int8())), "codec=PerPair"),
        ((PerPair.by_node([0, 1], far=False), Int8()), "codec=False"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=f"expected a codec such as Int8.*got {found}"):
            codecs_of(wrong)  # type: ignore[arg-type]
