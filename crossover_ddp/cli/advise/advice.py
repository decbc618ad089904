"""Predict how much each way to use the network's time would speed a measured job up, with its bound. Pure.

A factor is how many times faster steps are done: of this job, or, for siblings, of two such jobs against one after the
other. No expectation exceeds its bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from crossover_ddp._planning import (
    BucketPlan,
    CodecCost,
    Link,
    Workload,
    all_reduce_step_s,
    coded_step_s,
    decoupled_step_s,
    plan_averaging,
    plan_buckets,
)

from .step_figures import DECOUPLED, WRAPPED, Figures, workload

SMALL_SHARE: Final = 0.05
"""If exposed communication is a smaller share of a step, no change is worth it."""
WORTH: Final = 1.05
"""Least expected factor that is worth a change."""
OF_BOUND: Final = 0.94
"""Median of what two siblings reached of their bound (0.88 to 0.99 in docs/measurements.md)."""
OF_AVERAGED: Final = 0.95
"""Part of max(C, M / sync_every), with its own C, that delayed averaging reached (docs/averaging.md, preset tiny)."""
OUT_OF_LINE: Final = 0.15
FINEST_PIECES: Final = 24
# Processor time of one half of a bucket's exchange, where compute and communication share a core: what the split
# and deferred exchanges cost beyond plain DDP (docs/measurements.md, "What a bucket costs the processor").
_SPLIT_CPU_S: Final = 0.15e-3
_DEFERRED_CPU_S: Final = 0.7e-3
DO_NOT_BOTHER: Final = "do not bother"
_MEGABYTE: Final = 1024 * 1024

CROSSOVER: Final = "crossover (two sibling jobs)"
DECOUPLED_TRAINING: Final = "decoupled training"
BUCKET_SIZE: Final = "another bucket size"
HALF_PRECISION: Final = "half precision on the wire"
ACCUMULATION: Final = "gradient accumulation, k=2"
AVERAGING: Final = "averaged replicas"
POWER_SGD: Final = "PowerSGD"
CODEC: Final = "a codec, Int8()"
# Of Int8() with two ranks, on one core (docs/measurements.md, "Codecs").
_INT8: Final = CodecCost(rate=0.254, hook_s=0.62e-9, worker_s=1.15e-9)
MUON_OWNERS: Final = "Muon on its owners"
_MUON_BYTES: Final = 0.75


@dataclass(frozen=True)
class Option:
    """One way to speed the job up.

    Args:
        what: its name.
        factor: expected; None if it is not known.
        bound: greatest factor that C, N and M allow; None if it is not known.
        step_s: expected seconds per step; for siblings per step of both; None if it is not known.
        write: the line of code.
        caveat: what the user must know before.
        same_training: whether losses stay those of plain DDP.
        bucket_cap_mb: the size of buckets for which ``factor`` holds; None: the present buckets.
        recommended: False if another way that costs the training less is as fast; then it is shown, not advised.
    """

    what: str
    factor: float | None
    bound: float | None
    step_s: float | None
    write: str
    caveat: str
    same_training: bool = True
    bucket_cap_mb: float | None = None
    recommended: bool = True


@dataclass(frozen=True)
class Advice:
    """All ways, the verdict, and what makes it less certain.

    Args:
        options: in the order in which they are shown.
        verdict: one or two sentences.
        best: name of the best way that keeps the training as it is; None: do not bother.
        model_step_s: the cost model's time of the present step; None if no buckets were recorded.
        notes: what makes the figures less certain.
    """

    options: tuple[Option, ...]
    verdict: str
    best: str | None
    model_step_s: float | None
    notes: tuple[str, ...]


def advise(found: Figures) -> Advice:
    """Return the expected gain of each way, and which one to take."""
    model_step_s = None if found.hook == WRAPPED else _present_step_s(found, workload(found), _link(found))
    rivals = (*_alone(found), half_precision(found), codec(found))
    options = (
        crossover(found),
        *rivals,
        accumulation(found),
        averaging(found, rivals),
        power_sgd(),
        muon_owners(found),
    )
    best = _best(options)
    worth = found.exposed_s >= SMALL_SHARE * found.step_s and best is not None
    return Advice(
        options=options,
        verdict=_verdict(found, options, best),
        best=best.what if worth and best is not None else None,
        model_step_s=model_step_s,
        notes=_notes(found, model_step_s),
    )


def sibling_bound(compute_s: float, exposed_s: float, wire_s: float) -> float:
    """Return S = 2(C + N) / max(2C, C + N, 2M) of two equal jobs against one after the other; from 1 to 2.

    Args:
        compute_s: C, more than 0.
        exposed_s: N.
        wire_s: M. It cannot exceed C + N; more is measuring noise and is cut off.
    """
    step_s = compute_s + exposed_s
    return 2 * step_s / max(2 * compute_s, step_s, 2 * min(wire_s, step_s))


# --- the ways -----------------------------------------------------------------------------------------------------


def crossover(found: Figures) -> Option:
    """Two jobs that take turns on the same devices."""
    wire_s = found.exposed_s if found.wire_s is None else found.wire_s
    bound = sibling_bound(found.compute_s, found.exposed_s, wire_s)
    known = found.wire_s is not None
    if found.hook == DECOUPLED:
        write = "model.register_comm_hook(DecoupledState(optimizer, mutex=GPUMutex()), decoupled_hook)"
    elif found.hook == WRAPPED:
        write = "(as it is)"
    else:
        write = "model.register_comm_hook(CrossoverState(), crossover_hook)"
    caveat = "needs a second job of yours on the same devices, and memory for both"
    return Option(
        CROSSOVER,
        OF_BOUND * bound if known else None,
        bound,
        2 * found.step_s / (OF_BOUND * bound) if known else None,
        write,
        caveat if known else f"{caveat}; a wrapped hook does not record M, so the bound assumes M = N",
    )


def decoupled(found: Figures) -> Option:
    """All-gather and update in the next forward."""
    plan = _plan(found, decoupled=True)
    caveat = "forward is taken for a third of C; see docs/decoupled.md for who may read parameters when"
    if found.hook == DECOUPLED:
        caveat = f"in use already; this is what other buckets would bring. {caveat}"
    option = _faster(
        found,
        DECOUPLED_TRAINING,
        plan.step_s,
        max(found.compute_s, 2 * _link(found).beta_s * found.size_bytes),
        "model.register_comm_hook(DecoupledState(optimizer), decoupled_hook)  # and DistributedDataParallel(model, "
        f"bucket_cap_mb={_cap(plan)}, gradient_as_bucket_view=True)",
        caveat,
    )
    return replace(option, bucket_cap_mb=plan.bucket_cap_mb)


def bucket_size(found: Figures) -> Option:
    """Plain DDP, or the split, with larger or smaller buckets."""
    plan = _plan(found, decoupled=False)
    present = f"now {len(found.buckets)} of {_megabytes(found.size_bytes / len(found.buckets))} MB"
    caveat = f"{present}, then {plan.buckets}"
    if not found.alpha_known:
        caveat += "; what larger buckets save of the link's start-up time is not known"
    option = _faster(
        found,
        BUCKET_SIZE,
        plan.step_s,
        max(found.compute_s, 2 * _link(found).beta_s * found.size_bytes),
        f"DistributedDataParallel(model, bucket_cap_mb={_cap(plan)})",
        caveat,
    )
    return replace(option, bucket_cap_mb=plan.bucket_cap_mb)


def half_precision(found: Figures) -> Option:
    """Torch's fp16_compress_hook: half of the bytes."""
    write = "model.register_comm_hook(None, fp16_compress_hook)  # torch's default_hooks"
    caveat = "gradients are rounded to float16; the casts' time is not counted"
    if found.hook == DECOUPLED:
        caveat = f"in the place of decoupled_hook; {caveat}"
    if found.hook == WRAPPED:
        return Option(HALF_PRECISION, None, None, None, write, _NOT_KNOWN, same_training=False)
    link = _link(found)
    halved = Link(link.alpha_s, link.beta_s / 2)
    option = _faster(
        found,
        HALF_PRECISION,
        all_reduce_step_s(workload(found), halved),
        max(found.compute_s, link.beta_s * found.size_bytes),
        write,
        caveat,
    )
    return replace(option, same_training=False)


def codec(found: Figures) -> Option:
    """`Int8()` under the present hook: a quarter of the bytes."""
    state = (
        "DecoupledState(optimizer, codec=Int8())" if found.hook == DECOUPLED else "CompressedState(Int8())"
    )
    hook = "decoupled_hook" if found.hook == DECOUPLED else "compressed_hook"
    write = f"model.register_comm_hook({state}, {hook})  # crossover_ddp.codecs"
    if found.hook == WRAPPED:
        return Option(CODEC, None, None, None, write, _NOT_KNOWN, same_training=False)
    predict = decoupled_step_s if found.hook == DECOUPLED else all_reduce_step_s
    coded = coded_step_s(workload(found), _link(found), _INT8, predict)
    limit_s = max(found.compute_s, 2 * _INT8.rate * _link(found).beta_s * found.size_bytes)
    caveat = (
        "gradients are rounded to 8 bits, the rest is sent later; state.plan_codec() chooses among codecs"
    )
    return replace(_faster(found, CODEC, coded, limit_s, write, caveat), same_training=False)


def accumulation(found: Figures) -> Option:
    """One exchange for two mini-batches."""
    factor = found.step_s / _accumulated_s(found, 2)
    return Option(
        ACCUMULATION,
        factor,
        found.step_s / found.compute_s,
        found.step_s / factor,
        "with model.no_sync(): for the first of two backwards",
        "time per mini-batch; doubles the batch of a step, so other losses. More of it: the bound",
        same_training=False,
    )


def _accumulated_s(found: Figures, batches: int) -> float:
    """Return the time of a mini-batch if one exchange serves so many."""
    return found.compute_s + found.exposed_s / batches


def averaging(found: Figures, rivals: Sequence[Option]) -> Option:
    """Local SGD with delayed averaging: parameters travel now and then, and no step waits for them.

    Args:
        found: the job.
        rivals: ways with which replicas stay equal. Averaging is recommended only where it is faster than all of them,
            and than accumulation with as little traffic.
    """
    if found.wire_s is None:
        return Option(AVERAGING, None, None, None, "", _NOT_KNOWN, same_training=False)
    try:
        plan = plan_averaging(found.compute_s, found.size_bytes, _link(found))
    except ValueError as error:
        return Option(AVERAGING, None, None, None, "", str(error), same_training=False)
    every = plan.sync_every
    limit_s = min(max(found.compute_s, 2 * _link(found).beta_s * found.size_bytes / every), found.step_s)
    step_s = max(plan.step_s / OF_AVERAGED, limit_s)
    others = {each.what: each.step_s for each in rivals if each.step_s is not None}
    others[f"accumulation of {every}"] = _accumulated_s(found, every)
    rival = min(others, key=lambda what: others[what])
    recommended = step_s * WORTH <= others[rival]
    why = (
        "" if recommended else f"not worth it here: {rival} takes {others[rival] * 1e3:.0f} ms a mini-batch; "
    )
    return Option(
        AVERAGING,
        found.step_s / step_s,
        found.step_s / limit_s,
        step_s,
        f"model.register_comm_hook(LocalSGDState({every}, delay={plan.delay}, fragments={plan.fragments}), "
        "local_sgd_hook)  # and DDP(model, forward_sync_buffers=False), before torch 2.14 broadcast_buffers=False",
        why + _DRIFT,
        same_training=False,
        recommended=recommended,
    )


def power_sgd() -> Option:
    """Named without a prediction: the gain depends on the approximation rank that the training tolerates."""
    return Option(
        POWER_SGD,
        None,
        None,
        None,
        "model.register_comm_hook(PowerSGDState(None), powerSGD_hook)  # torch's own",
        "lossy, with compute of its own; not predicted: try it",
        same_training=False,
    )


_DRIFT: Final = (
    "replicas drift apart between two averages, so convergence suffers, the more the longer the interval is (public "
    "figures for DiLoCo: 3 % more evaluation loss at 25 steps, 9 % at 500); compare one run, see docs/averaging.md"
)


def muon_owners(found: Figures) -> Option:
    """Each matrix of torch.optim.Muon on one rank: what it saves of the wire is known, of the computation not."""
    write = "model.register_comm_hook(MuonState(muon), muon_hook)"
    caveat = "only for a job trained by torch.optim.Muon; what it saves of Newton-Schulz is not recorded"
    if found.hook != WRAPPED:
        link = _link(found)
        option = _faster(
            found,
            MUON_OWNERS,
            all_reduce_step_s(workload(found), Link(link.alpha_s, _MUON_BYTES * link.beta_s)),
            max(found.compute_s, _MUON_BYTES * 2 * link.beta_s * found.size_bytes),
            write,
            caveat,
        )
        caveat += f"; its bytes alone, {_MUON_BYTES} of these if all are Muon's, bring {option.factor:.2f}×"
    return Option(MUON_OWNERS, None, None, None, write, caveat)


_NOT_KNOWN: Final = (
    "not known: a wrapped hook records no buckets; measure with reduce_scatter_all_gather_hook"
)


def _alone(found: Figures) -> tuple[Option, ...]:
    if found.hook == WRAPPED:
        return tuple(
            [Option(what, None, None, None, "", _NOT_KNOWN) for what in (DECOUPLED_TRAINING, BUCKET_SIZE)]
        )
    return (decoupled(found),) if found.hook == DECOUPLED else (decoupled(found), bucket_size(found))


def _faster(
    found: Figures, what: str, model_step_s: float, limit_s: float, write: str, caveat: str
) -> Option:
    """Scale the measured step by the model's ratio; no step is faster than ``limit_s``."""
    present_s = _present_step_s(found, workload(found), _link(found))
    limit_s = min(limit_s, found.step_s)
    step_s = max(found.step_s * model_step_s / present_s, limit_s)
    return Option(what, found.step_s / step_s, found.step_s / limit_s, step_s, write, caveat)


def _plan(found: Figures, *, decoupled: bool) -> BucketPlan:
    """Choose the buckets by the package's own planner."""
    cpu_s = _DEFERRED_CPU_S if decoupled else _SPLIT_CPU_S
    link = replace(_link(found), cpu_s=cpu_s)
    fine = workload(found, pieces=FINEST_PIECES)
    # C contains the cost of the recorded buckets: subtract that. The planner subtracts the burden that is added last.
    recorded = len(found.buckets) * (_DEFERRED_CPU_S if found.hook == DECOUPLED else _SPLIT_CPU_S)
    bare = fine.burdened(-recorded / len(fine.buckets))
    predict = decoupled_step_s if decoupled else all_reduce_step_s
    return plan_buckets(bare.burdened(cpu_s), link, predict)


def _present_step_s(found: Figures, work: Workload, link: Link) -> float:
    """Return the cost model's time of the present step."""
    return (decoupled_step_s if found.hook == DECOUPLED else all_reduce_step_s)(work, link)


def _link(found: Figures) -> Link:
    assert found.link is not None
    return found.link


def _cap(plan: BucketPlan) -> str:
    return _megabytes(plan.cap_bytes)


def _megabytes(size_bytes: float) -> str:
    return (
        f"{size_bytes / _MEGABYTE:.2g}" if size_bytes < 100 * _MEGABYTE else f"{size_bytes / _MEGABYTE:.0f}"
    )


# --- what to conclude ---------------------------------------------------------------------------------------------


def _best(options: tuple[Option, ...], *, same_training: bool = True) -> Option | None:
    """Return the way with the greatest expected factor, if that is worth a change."""
    known = [
        each
        for each in options
        if each.factor is not None and each.recommended and each.same_training is same_training
    ]
    best = max(known, key=lambda each: each.factor or 0.0, default=None)
    return best if best is not None and (best.factor or 0.0) >= WORTH else None


def _verdict(found: Figures, options: tuple[Option, ...], best: Option | None) -> str:
    share = found.exposed_s / found.step_s
    if share < SMALL_SHARE:
        return f"{DO_NOT_BOTHER}: communication costs only {share:.1%} of a step"
    other = _best(options, same_training=False)
    otherwise = (
        "" if other is None else f"; {other.what} may bring {other.factor:.2f}×, but changes the training"
    )
    if best is not None:
        said = f"{best.what}: {best.factor:.2f}× expected, {best.bound:.2f}× at best" + _runner_up(
            options, best
        )
        return said + (otherwise if other is not None and other.what == AVERAGING else "")
    if found.hook == WRAPPED:
        return f"communication costs {share:.0%} of a step, of which a wrapped hook records too little{otherwise}"
    gain = f"nothing that keeps the training as it is can be expected to bring {WORTH - 1:.0%}"
    return f"{DO_NOT_BOTHER}: communication costs {share:.0%} of a step, but {gain}{otherwise}"


def _runner_up(options: tuple[Option, ...], best: Option) -> str:
    """Name the best way for one job if the verdict is for two jobs, and the other way round."""
    for_two = best.what == CROSSOVER
    other = _best(tuple([each for each in options if (each.what == CROSSOVER) is not for_two]))
    who = "for a job alone" if for_two else "with a second job at hand"
    return "" if other is None else f"; {who} {other.what}: {other.factor:.2f}×"


def _notes(found: Figures, model_step_s: float | None) -> tuple[str, ...]:
    notes = []
    if model_step_s is not None and abs(model_step_s / found.step_s - 1) > OUT_OF_LINE:
        notes.append(
            f"the cost model gives {model_step_s * 1e3:.0f} ms for the step as it is, measured "
            f"{found.step_s * 1e3:.0f}: take the predictions of buckets as rough"
        )
    lower_s, upper_s = found.spread_s
    if upper_s - lower_s > 0.2 * found.step_s:
        notes.append(
            f"half of the steps took {lower_s * 1e3:.0f} to {upper_s * 1e3:.0f} ms: is something else running here? "
            "Measure on an idle machine"
        )
    if found.lag_s > 0.1 * found.step_s:
        notes.append(
            f"the slowest rank computes {found.lag_s * 1e3:.0f} ms longer than the fastest in each step; the others "
            "wait for it, and no hook can change that"
        )
    if found.waited_s > 0.02 * found.step_s:
        notes.append(
            f"the job waited {found.waited_s * 1e3:.0f} ms a step for its turn, so a sibling ran: C and M "
            "contain its share; measure the job alone"
        )
    if found.link is not None and not found.alpha_known:
        notes.append(
            "the buckets' sizes and times do not determine both the link's start-up time and its rate: α = 0 is "
            "assumed, which favours small buckets"
        )
    return tuple(notes)
