"""Plain DDP and every hook walk the same path, on identical seeds, in all cases and with 1 to 4 ranks.

One launch per world size runs everything; each test then looks up its own finding. All hooks run with two ranks, with
others one hook of each kind, and of cases with and without views one. Unless CROSSOVER_CAMPAIGN is set, which runs
everything with everything.
"""

import contextlib
import hashlib
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.conformance.cases import CASES, Results, Wrap, seeded
from tests.multiprocess.conformance.hooks import HOOKS, Row

WORLD_SIZES = (1, 2, 3, 4)
# By world size: alone there is no peer; what differs from two ranks is the layout, of which each kind of payload has
# its own, and the ring, which all of them share.
OF_EACH_KIND = {
    1: (
        "split",
        "crossover",
        "averaged_every_step",
        "decoupled",
        "identity_codec",
        "kfac_of_nothing",
        "muon_of_nothing",
    ),
    3: ("decoupled", "identity_codec", "kfac_of_nothing", "muon_of_nothing"),
    4: ("split",),
}
# Finding of one case with one hook: what differs from plain DDP, and a digest of the results.
Finding = tuple[str, str]


def hooks(world_size: int) -> dict[str, Row]:
    """Return the hooks that run with so many ranks."""
    names = HOOKS if IN_CAMPAIGN else OF_EACH_KIND.get(world_size, HOOKS)
    return {name: HOOKS[name] for name in names}


def cases(hook: str, world_size: int) -> list[str]:
    """Return a hook's cases, one of a pair with and without views where both would run the same."""
    pairs = {name: f"{name}_viewed" for name in CASES if f"{name}_viewed" in CASES}
    repeated: set[str] = set()
    if HOOKS[hook].options:  # these are views, whatever the case asks for
        repeated = set(pairs)
    # No layout tells views apart, and that hook is ``decoupled`` with them.
    elif world_size != 2 or hook == "decoupled_and_copied":
        repeated = set(pairs.values())
    return [name for name in CASES if IN_CAMPAIGN or name not in repeated]


def findings_of_rank(rank: int, world_size: int) -> dict[tuple[str, str], Finding]:
    findings = {}
    for case in CASES:
        expected = run_case(case, rank, world_size, None)
        for hook, row in hooks(world_size).items():
            if case in cases(hook, world_size) and case not in (row.skip or {}):
                got = run_case(case, rank, world_size, row)
                bitwise = world_size in row.bitwise_world_sizes
                difference = differences(got, expected, 0.0 if bitwise else row.tolerance)
                findings[hook, case] = difference, digest(got)
    return findings


def run_case(case: str, rank: int, world_size: int, row: Row | None) -> Results:
    with seeded(5), contextlib.ExitStack() as stack:
        return CASES[case](wrapping(row, stack), rank, world_size)


def wrapping(row: Row | None, stack: contextlib.ExitStack) -> Wrap:
    def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
        model = DistributedDataParallel(module, **{**options, **(row.options if row else {})})
        if row is not None and row.register is not None:
            stack.enter_context(row.register(model))
        if row is not None and row.attach is not None:
            attach = row.attach
            vars(model)["attach"] = lambda optimizer: stack.enter_context(attach(model, optimizer))
        return model

    return wrap


def differences(got: Results, expected: Results, tolerance: float) -> str:
    # Where nobody may read gradients only the outcome is left to compare.
    unread = {name for name in expected if name not in got}
    assert got.keys() <= expected.keys()
    assert all(" gradient of " in name for name in unread), unread
    return "\n".join(
        found for name in got if (found := difference(name, got[name], expected[name], tolerance))
    )


def difference(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{name}: {got.shape} {got.dtype}, expected {expected.shape} {expected.dtype}"
    if torch.equal(got, expected) or (got.isnan().all() and expected.isnan().all()):
        return ""
    error = float((got.double() - expected.double()).abs().max())
    scale = float(expected.double().abs().max())
    epsilon = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
    return "" if error <= tolerance * epsilon * scale else f"{name}: off by {error:.3g} of {scale:.3g}"


def digest(results: Results) -> str:
    state = hashlib.sha256()
    for name in sorted(results):
        # Each rank has its own buffers during forward; DDP makes them equal before the next one.
        if not name.startswith("forward") and not name.endswith(".mine"):
            state.update(name.encode())
            state.update(results[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


@cache
def findings(world_size: int) -> list[dict[tuple[str, str], Finding]]:
    return run_ranks(findings_of_rank, world_size, timeout_s=240)


# What torch itself does shows in small worlds, at once.
CELLS = [
    pytest.param(
        world_size,
        hook,
        case,
        id=f"{hook}-{case}-{world_size}",
        marks=[pytest.mark.torch_version] if world_size <= 2 else [],
    )
    for world_size in WORLD_SIZES
    for hook in hooks(world_size)
    for case in cases(hook, world_size)
]


@pytest.mark.parametrize(("world_size", "hook", "case"), CELLS)
def test_hook_agrees_with_plain_ddp(world_size: int, hook: str, case: str) -> None:
    reason = (HOOKS[hook].skip or {}).get(case)
    if reason:
        pytest.skip(reason)
    of_ranks = [of_rank[hook, case] for of_rank in findings(world_size)]
    for rank, (difference_, _) in enumerate(of_ranks):
        assert not difference_, f"rank {rank} differs from plain DDP:\n{difference_}"
    assert len({digest_ for _, digest_ in of_ranks}) == 1, "the ranks differ from each other"
