"""One bucket's messages without processes: all ranks in one, in any order, on a device as on the host."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossover_ddp._compression.choice import CodecChoice, codecs_of
from crossover_ddp._compression.codec import Scratch, Whole
from crossover_ddp._compression.coded_link import CodedLink, DrainedLink, parts_of, runs_of
from crossover_ddp._ddp.contents import Content
from crossover_ddp._ddp.layout import spans_of
from crossover_ddp._engine.links import LinkAround
from crossover_ddp.codecs import Codec, Half, Int8, PerPair, SIDCo
from tests.harness.world import World

# A large matrix, a bias, and matrices whose last blocks are short.
NUMELS, DIMENSIONS = [40000, 50, 3000, 20, 7], [2, 1, 2, 1, 2]
CPU = torch.device("cpu")
PAIRS: list[tuple[Codec, Codec]] = [
    (Int8(), Int8()),
    (Int8(64), Half()),
    (Half(torch.float16), Int8(100)),
    (Half(), Half()),
]


class Ranks:
    """All ranks of one bucket; owners with work double what they have."""

    def __init__(
        self,
        codec: CodecChoice,
        world_size: int,
        device: torch.device = CPU,
        *,
        by_collectives: bool = False,
        **options: Any,
    ) -> None:
        share = sum(NUMELS) // world_size
        self.layout = [share] * (world_size - 1) + [sum(NUMELS) - share * (world_size - 1)]
        parameters = [
            torch.empty([numel] + [1] * (dims - 1), device="meta")
            for numel, dims in zip(NUMELS, DIMENSIONS, strict=True)
        ]
        contents = [Content(p, p, span) for p, span in zip(parameters, spans_of(tuple(NUMELS)), strict=True)]
        self.parts = parts_of(self.layout, runs_of(contents, self.layout))
        self.by_collectives = by_collectives
        links, scratch = self._links(), Scratch()
        self.coded = [
            CodedLink(link, codecs_of(codec), parameters, self.parts, device, scratch, **options)
            for link in links
        ]

    def _links(self) -> list[Any]:
        self.world = World(len(self.layout))
        links = [self.world.link(rank) for rank in range(self.world.size)]
        for link in links:
            link.in_program_order = self.by_collectives
        return links

    def step(self, flats: Sequence[torch.Tensor], *, drained: bool = False) -> None:
        """Replace each rank's gradient by the mean."""
        kept = self.kept() if drained else []

        async def journey(rank: int, link: Any) -> None:
            coded, flat = self.coded[rank], flats[rank]
            way: LinkAround = coded
            if drained:  # ranks' residuals are in the gradients
                flat.add_(kept[rank])
                way = DrainedLink(link, coded, self.parts[rank])
            else:
                coded.encode(flat, self.parts, link)
            own = await way.reduce_scatter(flat, self.layout)
            await way.compute()
            if coded.has_work:
                own.mul_(2)
            await way.all_gather(flat, self.layout)

        for rank, link in enumerate(self._links()):
            self.world.start(f"journey {rank}", rank, journey(rank, link))
        self.world.run(random.Random(0).choice)
        assert not self.world.failures

    def kept(self) -> list[torch.Tensor]:
        """Return each rank's residuals, as long as a gradient."""
        found = []
        for coded in self.coded:
            kept = {id(parameter): residual.cpu() for parameter, residual in coded.kept()}
            empty = zip(coded.parameters, map(torch.zeros, NUMELS), strict=True)
            found.append(torch.cat([kept.get(id(parameter), zeros) for parameter, zeros in empty]))
        return found


def gradients(world_size: int, step: int, device: torch.device = CPU) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(sum(NUMELS), generator=generator).pow(3).to(device) for _ in range(world_size)]


def per_pair(*nodes: int) -> tuple[PerPair, Codec]:
    return PerPair.by_node(nodes, far=Int8()), Int8()


@pytest.mark.parametrize(
    ("codec", "world_size"),
    [
        *(
            (codec, size)
            for codec in (Int8(), Half(), SIDCo(0.05), (SIDCo(0.05), Int8(100)))
            for size in (2, 3, 4)
        ),
        *((per_pair(*nodes), len(nodes)) for nodes in ((0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1))),
    ],
    ids=repr,
)
def test_what_is_applied_and_what_is_kept_are_all_gradients(codec: CodecChoice, world_size: int) -> None:
    ranks, missing = Ranks(codec, world_size), torch.zeros(sum(NUMELS), dtype=torch.float64)
    for step in range(6):
        flats = gradients(world_size, step)
        missing += torch.stack(flats).double().mean(0)
        ranks.step(flats)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        missing -= flats[0]
    kept = ranks.kept()
    assert all(bool(each.any()) for each in kept)
    missing -= torch.stack(kept).double().mean(0)
    assert float(missing.abs().max()) < 1e-4


def test_near_messages_are_whole() -> None:
    ranks = Ranks(per_pair(0, 0, 1), 3)
    ranks.step(flats := gradients(3, 0))
    near, _, far = [link.sent_bytes("reduce_scatter", flats[0])[0] for link in ranks.coded]
    assert 2 * 0.254 < far / (4 * NUMELS[0] / 3) < 0.6 < 1.2 < near / (4 * NUMELS[0] / 3)


@pytest.mark.parametrize("by_collectives", [False, True])
def test_messages_stay_where_they_are_and_collectives_get_parts_where_they_are_fast(
    by_collectives: bool,
) -> None:
    ranks, places = Ranks((Int8(), Half()), 3, by_collectives=by_collectives), []
    for step in range(2):
        ranks.step(gradients(3, step))
        sent = [each for link in ranks.coded for each in (link._outgoing, link._incoming, link._gather)]
        places.append([each.tensor.data_ptr() for each in sent])
    assert places[0] == places[1]
    if by_collectives:
        assert all(length % 128 == 0 for each in sent for length in each.layout)
        assert all(len(set(link._gather.layout)) == 1 for link in ranks.coded)


def check_bits(codecs: tuple[Codec, Codec], world_size: int, device: torch.device) -> None:
    """Compare all that is applied, and all that is kept, with what a bucket on gloo makes of it."""
    there, here = Ranks(codecs, world_size, device, by_collectives=True), Ranks(codecs, world_size)
    for step in range(5):
        found, expected = gradients(world_size, step, device), gradients(world_size, step)
        there.step(found)
        here.step(expected)
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got.cpu(), wanted)
    for got, wanted in zip(there.kept(), here.kept(), strict=True):
        assert bool(wanted.any())
        assert torch.equal(got, wanted)


def check_infinities(codecs: tuple[Codec, Codec], bad: float, device: torch.device) -> None:
    """One rank's value makes its owner's coded part NaN everywhere, and stays out of all residuals."""
    ranks = Ranks(codecs, 3, device)
    ranks.step(gradients(3, 0, device))
    before, flats, owner = ranks.kept(), gradients(3, 1, device), 0
    flats[1][10] = bad
    ranks.step(flats)
    for flat in flats:
        assert all(bool(flat[slice(*each.span)].isnan().all()) for each in ranks.parts[owner].coded)
    after = ranks.kept()
    assert all(bool(residual.isfinite().all()) for residual in after)
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True)), "others' residuals go on"
    ranks.step(found := gradients(3, 2, device))
    assert all(bool(flat.isfinite().all()) for flat in found)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("codecs", [*PAIRS[:3], (SIDCo(0.05), Int8())], ids=repr)
def test_infinities_reach_all_ranks_and_no_residual(codecs: tuple[Codec, Codec], bad: float) -> None:
    check_infinities(codecs, bad, CPU)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codecs", PAIRS, ids=repr)
def test_buckets_for_collectives_have_the_bits_of_those_for_messages(
    codecs: tuple[Codec, Codec], world_size: int
) -> None:
    check_bits(codecs, world_size, CPU)


def test_where_all_gradients_are_zero_nothing_is_sent_if_the_parameter_may_be_unused() -> None:
    """Those of one rank alone do not hold back what others send; its own waits."""
    start, stop = sum(NUMELS[:2]), sum(NUMELS[:3])
    ranks = Ranks(Int8(), 2, leaves_unused=True)
    ranks.step(gradients(2, 0))
    before = [kept[start:stop] for kept in ranks.kept()]
    flats = gradients(2, 1)
    for flat in flats:
        flat[start:stop] = 0
    ranks.step(flats)
    for flat, kept, old in zip(flats, ranks.kept(), before, strict=True):
        assert not flat[start:stop].any()
        assert bool(flat[:start].any())
        assert torch.equal(kept[start:stop], old)
    flats = gradients(2, 2)
    flats[0][start:stop] = 0
    ranks.step(flats)
    after = [kept[start:stop] for kept in ranks.kept()]
    assert bool(flats[0][start:stop].any())
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("codec", [Int8(), Whole()], ids=repr)
def test_what_owners_make_of_the_mean_comes_back(codec: Codec) -> None:
    """Twice the mean, rounded by two codecs; what is missing comes with an exact step."""
    ranks, missing, steps = Ranks(codec, 3, has_work=True), torch.zeros(sum(NUMELS)), 4
    exact = torch.tensor(DIMENSIONS).eq(1).repeat_interleave(torch.tensor(NUMELS))
    for step in range(steps):
        flats = gradients(3, step)
        wanted = 2 * torch.stack(flats).mean(0)
        ranks.step(flats, drained=step == steps - 1)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        assert torch.allclose(flats[0][exact], wanted[exact], atol=1e-6)
        missing += wanted - flats[0]
        is_rounded = codec != Whole() and step < steps - 1
        assert bool(missing.abs().max() > 1e-3) == is_rounded


# --- a codec for each pair of ranks ----------------------------------------------------------------------------------


def test_a_table_is_symmetric_and_its_diagonal_means_nothing() -> None:
    rows = [["self", Int8(), Half()], [Int8(), Int8(), Half()], [Half(), Half(), None]]
    pairs = PerPair(rows)  # type: ignore[arg-type]
    assert pairs == PerPair(((None, Int8(), Half()), (Int8(), None, Half()), (Half(), Half(), None)))
    assert hash(pairs) == hash(PerPair(pairs.codecs))
    for wrong, message in (
        ((), r"got \[\]"),
        (((None, None), (None,)), r"got \[2, 1\]"),
        (((None, Int8()), (Half(), None)), "from rank 0 to rank 1 and Half"),
    ):
        with pytest.raises(ValueError, match=message):
            PerPair(wrong)  # type: ignore[arg-type]


def test_what_goes_to_all_ranks_needs_one_codec() -> None:
    pairs = PerPair.by_node([0, 1], far=Int8())
    with pytest.raises(TypeError, match=r"a PerPair alone; pass codec=\(PerPair"):
        codecs_of(pairs)  # type: ignore[arg-type]
    former = SimpleNamespace(room=len, encode=len, add_decoded=len)  # of versions that asked codecs for room
    for wrong, found in (
        (former, "codec=namespace.* without nbytes, encode, add_decoded"),
        ((Int8(), pairs), "codec=PerPair"),
        ((PerPair.by_node([0, 1], far=False), Int8()), "codec=False"),  # type: ignore[arg-type]
        ((PerPair.by_node([0, 1], far="int8"), Int8()), "codec='int8'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=f"expected a codec such as Int8.*got {found}"):
            codecs_of(wrong)  # type: ignore[arg-type]
