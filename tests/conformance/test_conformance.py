"""Every hook trains like plain DDP from identical seeds, in all cases and with 1 to 4 ranks.

One run of the ranks per backend, world size and hook has all its cases. Each test looks up its own
finding. A reference of several hooks is trained once. The short form leaves out cells whose code
other cells run as well:

- With two ranks on gloo each hook runs all cases in which it does work of its own. In other cases
  only DDP's part differs. Each hook runs a third of them, and each of them runs with a third of the
  hooks.
- With other numbers of ranks one hook of each kind of payload runs the cases of `SHORT` and
  `OF_LAYOUTS`.
- On the other backends each hook runs `many_buckets` and one more case, in rotation. Rows that are
  like others run there only if they are in `OWN_PATH`.

With CROSSOVER_CAMPAIGN all hooks run all cases everywhere.
"""

import dataclasses
import hashlib
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.conformance import cases
from tests.conformance.__main__ import matrix, table
from tests.conformance.backends import BACKENDS, OF_LAYOUTS, SHORT, Backend
from tests.conformance.cases import CASES, LAZY, Results, Wrap, seeded
from tests.conformance.hooks import HOOKS, OF_MATRIX, ORACLES, ROWS, SITUATIONS, Row
from tests.conformance.reference import adding
from tests.harness import RankError
from tests.harness.campaign import IN_CAMPAIGN

WORLD_SIZES = (1, 2, 3, 4)
# The hooks of the short form, by world size. Only the layout of shards differs from two ranks. Each
# kind of payload has its own.
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
# With two levels one hook of each kind of payload runs on gloo, and some of these elsewhere.
OF_LEVELS_ELSEWHERE = ("split", "decoupled_int8", "owners")
OF_LEVELS = (
    *("split", "decoupled", "decoupled_int8", "identity_codec", "int8"),
    *("kfac_of_nothing", "muon", "owners"),
)
# Rows that are like others on gloo, but have a path of their own on other backends: buckets that
# bypass owners, a codec in deferred exchanges on a device, a foreign hook where ours are switched
# off.
OWN_PATH = ("decoupled_int8", "kfac_of_nothing", "muon_of_nothing", "wrapped_fp16")
# In these cases DDP makes, fills or awaits its buckets in another way. A hook takes the same path
# as in other cases.
OF_DDP = (
    *("one_bucket", "static_graph", LAZY, "bfloat16_parameters", "buffers_recomputed_in_backward"),
    *("fewer_elements_than_ranks", "frozen_parameters", "reentrant_checkpointing"),
    *("mixed_precision_by_autocast", "failing_forward"),
)
# The compiler takes seconds for each of these. In the short form one hook runs all of them, and one
# of each other way through a graph runs the first.
COMPILED = ("compiled_network", "compiled_blocks", "compiled_model")
COMPILED_IN_SHORT = {
    "split": COMPILED,
    **dict.fromkeys(("decoupled", "kfac", "muon"), COMPILED[:1]),
}
# Cases whose last bits differ for some hooks, by the beginnings of the hooks' names: their states
# compute the norm themselves, or over other buckets.
ROUNDED = {"clipping": ("auto", "decoupled", "owners")}


class Finding(NamedTuple):
    """The finding of one case with one hook."""

    # Differences to the reference, or an exception.
    difference: str
    # A digest of the results that must be the same on all ranks.
    digest: str
    # The number of forwards that began while updates were under way.
    pending: int


# Results in a form that is cheap to send to another process, which tensors are not: dtype, shape,
# bytes.
Packed = dict[str, tuple[torch.dtype, torch.Size, Any]]
# Names a reference: a row, or an order of additions and the optimizers.
Reference = str | tuple[str | None, Callable[[nn.Module, float], list[torch.optim.Optimizer]]]


def hooks(backend: str, world_size: int) -> dict[str, Row]:
    of_matrix = OF_MATRIX if (backend, world_size) == ("gloo", 2) else {}
    if IN_CAMPAIGN:
        return {**HOOKS, **of_matrix}
    if backend == "gloo":
        return {name: HOOKS[name] for name in OF_EACH_KIND.get(world_size, HOOKS)} | of_matrix
    if "levels" in backend:
        of_levels = OF_LEVELS if backend == "two_levels" else OF_LEVELS_ELSEWHERE
        return {name: row for name, row in HOOKS.items() if name in of_levels}
    return {name: row for name, row in HOOKS.items() if not row.is_like_others or name in OWN_PATH}


def cases_of(backend: str, hook: str, world_size: int) -> list[str]:
    row = ROWS[hook]
    number = [*ROWS].index(hook)
    without = {*row.refuses, *row.differs, *row.untested, *BACKENDS[backend].lacks}
    names = [name for name in CASES if name not in without]
    if hook in OF_MATRIX:
        names = [name for name in names if name in SITUATIONS.values()]
    if IN_CAMPAIGN:
        return names
    compiled = {*COMPILED} - {*COMPILED_IN_SHORT.get(hook, ())}
    names = [name for name in names if name not in compiled]
    if backend != "gloo":
        chosen = (SHORT[0], SHORT[1 + number % (len(SHORT) - 1)])
        return [name for name in names if name in chosen]
    if row.is_like_others or world_size != 2:
        chosen = SHORT + OF_LAYOUTS if world_size > 2 else SHORT
        return [name for name in names if name in chosen]
    of_other_hooks = {name for index, name in enumerate(OF_DDP) if (index + number) % 3}
    names = [name for name in names if name.removesuffix("_viewed") not in of_other_hooks]
    if row.options:  # the row's options make all gradients views
        return [name for name in names if f"{name}_viewed" not in CASES]
    if hook == "decoupled_and_copied":  # with views it is `decoupled`
        return [name for name in names if not name.endswith("_viewed")]
    return names


def findings_of_rank(
    rank: int, world_size: int, backend: str, hook: str, references: list[dict[str, Packed]]
) -> dict[str, Finding]:
    row = ROWS[hook]
    found = {}
    with BACKENDS[backend].around():
        for case in cases_of(backend, hook, world_size):
            rounded = is_rounded(hook, row, case, world_size, BACKENDS[backend])
            tolerance = row.tolerance if rounded else 0.0
            try:
                models: list[DistributedDataParallel] = []
                got = run_case(case, rank, world_size, row, models)
                difference = differences(got, unpack(references[rank][case]), tolerance)
                pending = sum(vars(model).get("pending", 0) for model in models)
                of_rank = digest(got) if row.ranks_agree else ""
                found[case] = Finding(difference, of_rank, pending)
            except Exception:
                found[case] = Finding(traceback.format_exc(), "", 0)
    return found


def references_of_rank(
    rank: int, world_size: int, backend: str, reference: Reference, names: list[str]
) -> dict[str, Packed]:
    row = ORDERED[reference] if isinstance(reference, tuple) else {**ROWS, **ORACLES}[reference]
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
    """Return whether results may differ from the reference within the row's tolerance."""
    if hook.startswith(ROUNDED.get(case, "-")) or (row.lossy and not backend.switches_off):
        return True
    knows_order = row.order == "tree" or (row.order is not None and backend.decodes_in_order)
    return world_size > 2 and not (knows_order and backend.adds_in_order)


def reference_of(row: Row, world_size: int, backend: Backend) -> Reference:
    # Where our hooks are switched off torch's own hooks still run.
    if row.like and (not backend.switches_off or row.like in dir(default_hooks)):
        return row.like
    order = row.order if world_size > 2 and backend.adds_in_order else None
    return order, row.optimizers


ORDERED = {
    (order, row.optimizers): Row(
        order and (lambda *_, by=order: adding(by)), optimizers=row.optimizers
    )
    for row in ROWS.values()
    for order in {each.order for each in HOOKS.values()}
}


def run_case(
    case: str,
    rank: int,
    world_size: int,
    row: Row,
    models: list[DistributedDataParallel] | None = None,
) -> Results:
    """Return the results of a case, and put its models into ``models``."""
    models = [] if models is None else models
    with seeded(5):
        results = CASES[case](wrapping(row, models), rank, world_size)
    for model in models:
        end(model)
    return {name: value.cpu() for name, value in results.items()}


def end(model: DistributedDataParallel) -> None:
    """Gather the optimizer state of owners, and close the model's state, if it has one."""
    for method in ("consolidate", "close"):
        getattr(vars(model).get("state"), method, lambda: None)()


def wrapping(row: Row, models: list[DistributedDataParallel]) -> Wrap:
    def wrap(module: nn.Module, **options: object) -> DistributedDataParallel:
        model = DistributedDataParallel(module.to(cases.DEVICE), **{**options, **row.options})
        vars(model)["row"] = row
        models.append(model)
        return model

    return wrap


def differences(got: Results, expected: Results, tolerance: float) -> str:
    # With some hooks gradients may not be read. Then only the final values are compared.
    unread = expected.keys() ^ got.keys()
    assert all(" gradient of " in name for name in unread), unread
    found = [
        difference(name, each, expected[name], tolerance)
        for name, each in got.items()
        if name in expected
    ]
    return "\n".join(filter(None, found))


def difference(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """Describe how a tensor differs from the expected one. Empty if it does not."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{name}: {got.shape} {got.dtype}, expected {expected.shape} {expected.dtype}"
    if torch.equal(got, expected) or bool(
        (got.isnan() & expected.isnan() | (got == expected)).all()
    ):
        return ""
    if not (tolerance and expected.is_floating_point()):
        return f"{name}: other bits, by {float((got.double() - expected.double()).abs().max()):.3g}"
    if bool((got.isfinite() & ~expected.isfinite()).any()):
        return f"{name}: finite where the reference is not"
    # The reverse is allowed: in a codec's message a NaN or infinity spreads to its neighbours.
    both = got.isfinite() & expected.isfinite()
    if not both.any():
        return ""
    error = float((got.double() - expected.double())[both].abs().max())
    scale = float(expected.double()[both].abs().max())
    epsilon = max(torch.finfo(kind).eps for kind in (expected.dtype, torch.float32))
    if error <= tolerance * epsilon * scale:
        return ""
    return f"{name}: off by {error:.3g} of {scale:.3g}"


def digest(results: Results) -> str:
    """Return a digest of the results that must be the same on all ranks."""
    state = hashlib.sha256()
    for name in sorted(results):
        # During forward each rank has its own buffers. DDP makes them equal before the next one.
        if not name.startswith("forward") and not name.endswith(".mine"):
            state.update(name.encode())
            state.update(bytes_of(results[name]).tobytes())
    return state.hexdigest()


@cache
def references(backend: str, world_size: int, reference: Reference) -> list[dict[str, Packed]]:
    """Train a reference of several hooks once, in all cases that any of them runs."""
    wanted = {
        case: None
        for hook, row in hooks(backend, world_size).items()
        if reference_of(row, world_size, BACKENDS[backend]) == reference
        for case in cases_of(backend, hook, world_size)
    }
    return BACKENDS[backend].run(references_of_rank, world_size, backend, reference, [*wanted])


@cache
def findings(backend: str, world_size: int, hook: str) -> list[dict[str, Finding]] | RankError:
    """Run all cases of a hook. An error is returned: it fails all tests of the hook at once."""
    try:
        reference = reference_of(ROWS[hook], world_size, BACKENDS[backend])
        expected = references(backend, world_size, reference)
        return BACKENDS[backend].run(findings_of_rank, world_size, backend, hook, expected)
    except RankError as error:
        return error


# On other versions of torch only the small worlds run: torch's own differences show there.
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
    for rank, each in enumerate(of_ranks):
        assert not each.difference, f"rank {rank} differs from its reference:\n{each.difference}"
    assert len({each.digest for each in of_ranks}) == 1, "the ranks differ from each other"
    row = ROWS[hook]
    if row.defers and case in SITUATIONS.values():
        gains = not row.notes.get(case, "").startswith("no gain")
        hidden = all(each.pending for each in of_ranks)
        assert hidden == gains, "the matrix says otherwise"


def refused(rank: int, world_size: int, backend: str, hook: str, case: str) -> None:
    with BACKENDS[backend].around():
        run_case(case, rank, world_size, ROWS[hook])


# One case for each reason for which a hook refuses cases.
REFUSALS = {
    (hook, words): case
    for hook, row in ROWS.items()
    for case, words in reversed(row.refuses.items())
}


@pytest.mark.parametrize(
    ("hook", "case", "words"),
    [
        pytest.param(hook, case, words, id=f"{hook}-{case}")
        for (hook, words), case in REFUSALS.items()
    ],
)
def test_an_unsupported_case_is_an_error_that_names_the_reason(
    hook: str, case: str, words: str
) -> None:
    """The rank that finds it raises this error. Other ranks may report that rank's end."""
    with pytest.raises(RankError, match=f"Error: .*{words}"):
        BACKENDS["gloo"].run(refused, 2, "gloo", hook, case)


NEED_VIEWS = [
    hook for hook, row in HOOKS.items() if "bucket_view" in row.notes.get("unused_parameters", "")
]


def refused_without_views(rank: int, world_size: int, hook: str) -> None:
    row = dataclasses.replace(HOOKS[hook], options={})
    run_case("unused_parameters", rank, world_size, row)


@pytest.mark.parametrize("hook", NEED_VIEWS)
def test_unused_parameters_need_bucket_views(hook: str) -> None:
    with pytest.raises(RankError, match=r"Error: .*gradient_as_bucket_view"):
        BACKENDS["gloo"].run(refused_without_views, 2, hook)


@pytest.mark.parametrize(
    ("name", "shown"), [("conformance", table), ("matrix", matrix)], ids=["table", "matrix"]
)
def test_the_documentation_shows_todays_tables(name: str, shown: Callable[[], str]) -> None:
    page = (Path(__file__).parents[2] / "docs/loops.md").read_text()
    found = page.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- /{name} -->")[0]
    assert found == shown(), "put the output of python -m tests.conformance into docs/loops.md"
