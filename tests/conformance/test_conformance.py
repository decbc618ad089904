"""Plain DDP and every hook walk the same path, on identical seeds, in all cases and with 1 to 4 ranks.

One launch per backend, world size and hook runs all its cases; each test then looks up its own finding. What several
hooks are compared with is trained once. The short form thins the product to pairs where several cells say the same:

- with two ranks on gloo each hook runs each case in which it has something of its own to do, and a third of those in
  which DDP alone has: each of these meets a third of the hooks;
- with other numbers of ranks one hook of each kind of payload runs those of `SHORT` and `OF_LAYOUTS`;
- on each other backend each hook runs many buckets and one more case, the next hook the next one.

CROSSOVER_CAMPAIGN runs everything with everything.
"""

import hashlib
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.conformance import cases
from tests.conformance.__main__ import table
from tests.conformance.backends import BACKENDS, OF_LAYOUTS, SHORT, Backend
from tests.conformance.cases import CASES, LAZY, Results, Wrap, seeded
from tests.conformance.hooks import HOOKS, ORACLES, Row
from tests.conformance.reference import adding
from tests.harness import RankError
from tests.harness.campaign import IN_CAMPAIGN

WORLD_SIZES = (1, 2, 3, 4)
# By world size: what differs from two ranks is the layout, of which each kind of payload has its own.
OF_EACH_KIND = {
    1: (
        "split",
        "crossover",
        "averaged_every_step",
        "decoupled",
        "identity_codec",
        "muon",
        "owners",
    ),
    3: ("decoupled", "identity_codec", "kfac_of_nothing", "owners"),
    4: ("split",),
}
# Here a hook meets the buckets that it meets elsewhere: DDP makes, fills or waits for them in another way.
OF_DDP = (
    *("one_bucket", "static_graph", LAZY, "bfloat16_parameters", "buffers_recomputed_in_backward"),
    *("fewer_elements_than_ranks", "frozen_parameters", "reentrant_checkpointing"),
    *("mixed_precision_by_autocast", "failing_forward"),
)
# What a state's own norm or another order of buckets makes of the last bits.
ROUNDED = {"clipping": ("decoupled", "owners")}
# Finding of one case with one hook: what differs from its reference, and a digest of the results.
Finding = tuple[str, str]
# Results as they are sent from process to process, which is cheap, of tensors it is not: dtype, shape, bytes.
Packed = dict[str, tuple[torch.dtype, torch.Size, Any]]
# A hook, or an order of additions and the optimizers.
Reference = str | tuple[str | None, Callable[[nn.Module, float], list[torch.optim.Optimizer]]]


def hooks(backend: str, world_size: int) -> dict[str, Row]:
    if IN_CAMPAIGN or backend != "gloo":
        return HOOKS
    return {name: HOOKS[name] for name in OF_EACH_KIND.get(world_size, HOOKS)}


def cases_of(backend: str, hook: str, world_size: int) -> list[str]:
    row, place = HOOKS[hook], [*HOOKS].index(hook)
    names = [
        name for name in CASES if name not in {*row.refuses, *row.differs, *BACKENDS[backend].lacks}
    ]
    if IN_CAMPAIGN:
        return names
    if backend != "gloo":
        return [name for name in names if name in (SHORT[0], SHORT[1 + place % (len(SHORT) - 1)])]
    if row.is_like_others or world_size != 2:
        return [name for name in names if name in SHORT + OF_LAYOUTS * (world_size > 2)]
    of_others = {name for number, name in enumerate(OF_DDP) if (number + place) % 3}
    names = [name for name in names if name.removesuffix("_viewed") not in of_others]
    if row.options:  # these are views, whatever the case asks for
        return [name for name in names if f"{name}_viewed" not in CASES]
    if hook == "decoupled_and_copied":  # with views it is `decoupled`
        return [name for name in names if not name.endswith("_viewed")]
    return names


def findings_of_rank(
    rank: int, world_size: int, backend: str, hook: str, references: list[dict[str, Packed]]
) -> dict[str, Finding]:
    row, found = HOOKS[hook], {}
    with BACKENDS[backend].around():
        for case in cases_of(backend, hook, world_size):
            rounded = is_rounded(hook, row, case, world_size, BACKENDS[backend])
            tolerance = row.tolerance if rounded else 0.0
            try:
                got = run_case(case, rank, world_size, row)
                found[case] = (
                    differences(got, unpack(references[rank][case]), tolerance),
                    digest(got),
                )
            except Exception:
                found[case] = traceback.format_exc(), ""
    return found


def references_of_rank(
    rank: int, world_size: int, backend: str, reference: Reference, names: list[str]
) -> dict[str, Packed]:
    row = ORDERED[reference] if isinstance(reference, tuple) else {**HOOKS, **ORACLES}[reference]
    with BACKENDS[backend].around():
        return {case: pack(run_case(case, rank, world_size, row)) for case in names}


def pack(results: Results) -> Packed:
    return {name: (each.dtype, each.shape, bytes_of(each)) for name, each in results.items()}


def unpack(packed: Packed) -> Results:
    return {
        name: torch.from_numpy(array).view(dtype).view(shape)
        for name, (dtype, shape, array) in packed.items()
    }


def bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def is_rounded(hook: str, row: Row, case: str, world_size: int, backend: Backend) -> bool:
    if hook.startswith(ROUNDED.get(case, "-")) or (row.lossy and not backend.switches_off):
        return True
    knows_order = row.order == "tree" or (row.order is not None and backend.decodes_in_order)
    return world_size > 2 and not (knows_order and backend.adds_in_order)


def reference_of(row: Row, world_size: int, backend: Backend) -> Reference:
    if row.like and (
        not backend.switches_off or row.like in dir(default_hooks)
    ):  # somebody else's hook stays
        return row.like
    return row.order if world_size > 2 and backend.adds_in_order else None, row.optimizers


ORDERED = {
    (order, row.optimizers): Row(
        order and (lambda *_, by=order: adding(by)), optimizers=row.optimizers
    )
    for row in HOOKS.values()
    for order in {each.order for each in HOOKS.values()}
}


def run_case(case: str, rank: int, world_size: int, row: Row) -> Results:
    models: list[DistributedDataParallel] = []
    with seeded(5):
        results = CASES[case](wrapping(row, models), rank, world_size)
    for model in models:
        end(model)
    return {name: value.cpu() for name, value in results.items()}


def end(model: DistributedDataParallel) -> None:
    for last in ("consolidate", "close"):
        getattr(vars(model).get("state"), last, lambda: None)()


def wrapping(row: Row, models: list[DistributedDataParallel]) -> Wrap:
    def wrap(module: nn.Module, **options: object) -> DistributedDataParallel:
        model = DistributedDataParallel(module.to(cases.DEVICE), **{**options, **row.options})
        vars(model)["row"] = row
        models.append(model)
        return model

    return wrap


def differences(got: Results, expected: Results, tolerance: float) -> str:
    # Where nobody may read gradients only the outcome is left to compare.
    unread = expected.keys() ^ got.keys()
    assert all(" gradient of " in name for name in unread), unread
    found = [
        difference(name, each, expected[name], tolerance)
        for name, each in got.items()
        if name in expected
    ]
    return "\n".join(filter(None, found))


def difference(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{name}: {got.shape} {got.dtype}, expected {expected.shape} {expected.dtype}"
    if torch.equal(got, expected) or bool(
        (got.isnan() & expected.isnan() | (got == expected)).all()
    ):
        return ""
    if not (tolerance and expected.is_floating_point()):
        return f"{name}: other bits, by {float((got.double() - expected.double()).abs().max()):.3g}"
    # A message of a codec carries what is not finite to its neighbours.
    both = got.isfinite() & expected.isfinite()
    if bool((got.isfinite() & ~expected.isfinite()).any()):
        return f"{name}: finite where the reference is not"
    error = float((got.double() - expected.double())[both].abs().max()) if both.any() else 0.0
    scale = float(expected.double()[both].abs().max()) if both.any() else 0.0
    epsilon = max(torch.finfo(kind).eps for kind in (expected.dtype, torch.float32))
    return (
        "" if error <= tolerance * epsilon * scale else f"{name}: off by {error:.3g} of {scale:.3g}"
    )


def digest(results: Results) -> str:
    state = hashlib.sha256()
    for name in sorted(results):
        # Each rank has its own buffers during forward; DDP makes them equal before the next one.
        if not name.startswith("forward") and not name.endswith(".mine"):
            state.update(name.encode())
            state.update(bytes_of(results[name]).tobytes())
    return state.hexdigest()


@cache
def references(backend: str, world_size: int, reference: Reference) -> list[dict[str, Packed]]:
    """Train once what several hooks are compared with, in all cases of any of them."""
    wanted = {
        case: None
        for hook, row in hooks(backend, world_size).items()
        if reference_of(row, world_size, BACKENDS[backend]) == reference
        for case in cases_of(backend, hook, world_size)
    }
    return BACKENDS[backend].run(references_of_rank, world_size, backend, reference, [*wanted])


@cache
def findings(backend: str, world_size: int, hook: str) -> list[dict[str, Finding]] | RankError:
    try:
        reference = reference_of(HOOKS[hook], world_size, BACKENDS[backend])
        walked = references(backend, world_size, reference)
        return BACKENDS[backend].run(findings_of_rank, world_size, backend, hook, walked)
    except RankError as error:  # it is that of all cells, and not to be waited for again
        return error


# What torch itself does shows in small worlds, at once.
CELLS = [
    pytest.param(
        backend,
        world_size,
        hook,
        case,
        id=f"{backend}-{hook}-{case}-{world_size}",
        marks=[
            *traits.marks,
            *([pytest.mark.torch_version] if world_size <= 2 and backend == "gloo" else []),
        ],
    )
    for backend, traits in BACKENDS.items()
    for world_size in (WORLD_SIZES if IN_CAMPAIGN else traits.world_sizes)
    for hook in hooks(backend, world_size)
    for case in cases_of(backend, hook, world_size)
]


@pytest.mark.parametrize(("backend", "world_size", "hook", "case"), CELLS)
def test_hook_agrees_with_plain_ddp(backend: str, world_size: int, hook: str, case: str) -> None:
    found = findings(backend, world_size, hook)
    if isinstance(found, RankError):
        raise found
    of_ranks = [of_rank[case] for of_rank in found]
    for rank, (difference_, _) in enumerate(of_ranks):
        assert not difference_, f"rank {rank} differs from its reference:\n{difference_}"
    assert len({digest_ for _, digest_ in of_ranks}) == 1, "the ranks differ from each other"


def refused(rank: int, world_size: int, backend: str, hook: str, case: str) -> None:
    with BACKENDS[backend].around():
        run_case(case, rank, world_size, HOOKS[hook])


# One case for each reason of a hook.
REFUSALS = {
    (hook, words): case
    for hook, row in HOOKS.items()
    for case, words in reversed(row.refuses.items())
}


@pytest.mark.parametrize(
    ("hook", "case", "words"),
    [
        pytest.param(hook, case, words, id=f"{hook}-{case}")
        for (hook, words), case in REFUSALS.items()
    ],
)
def test_what_a_hook_cannot_do_is_an_error(hook: str, case: str, words: str) -> None:
    """On the rank that finds it; others hear of that rank's end."""
    with pytest.raises(RankError, match=f"Error: .*{words}"):
        BACKENDS["gloo"].run(refused, 2, "gloo", hook, case)


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/loops.md").read_text()
    shown = page.partition("<!-- conformance -->\n")[2].partition("\n<!-- /conformance -->")[0]
    assert shown == table(), "put what python -m tests.conformance prints into docs/loops.md"
