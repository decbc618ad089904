"""Finds a plan for a chain on a cluster: checks the arguments, searches, and explains refusals."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from .cluster import DeviceCluster
from .memory import Packing, pack, recomputed_layers, recomputing_profile
from .model import Stage, StagedChain
from .numbering import canonical_order
from .plan import Plan
from .profile import Profile
from .search import Limits, Search

_RUNTIMES: Final = ("any", "torch")
_RECOMPUTED: Final = 60
"""How many cuts to try with recomputed layers."""


def plan_pipeline(
    profile: Profile | Mapping[int, Profile],
    cluster: DeviceCluster,
    *,
    microbatches: int | None = None,
    stages: int | None = None,
    max_stages: int | None = None,
    max_replicas: int | None = None,
    split: bool = False,
    runtime: str = "any",
    recompute: bool = False,
) -> Plan:
    """Find the plan with the shortest simulated step.

    Its step is never longer than the step of a known design that is allowed. Another numbering of
    the devices gives an equally long step.

    Args:
        profile: the costs of the layers, for one micro-batch. Or a mapping from numbers of
            micro-batches to profiles, each measured with micro-batches of the size that belongs to
            the number. Then the number of micro-batches is chosen as well. Numbers for which no plan
            exists are left out.
        cluster: the devices. A trained parameter takes four times its size in memory, and a frozen
            one takes its size.
        microbatches: the number of micro-batches in a step, M. Required unless ``profile`` is a
            mapping.
        stages: the exact number of stages. Default None: any.
        max_stages: the greatest number of stages. Default None: no limit.
        max_replicas: the greatest number of devices per stage. Default: the number of devices or M,
            whichever is less.
        split: whether to try plans with a split backward too; see [Note: split backward]. `Runner`
            cannot run such plans. Default False.
        runtime: ``torch`` for a plan that torch's own runtime can run (`Plan.schedule`): one device
            for each stage, or as many replicas of all stages. ``any``, the default, also allows
            plans with uneven replicas, which only `Runner` can run; see `Plan.runtimes`.
        recompute: whether layers may keep only their input, and compute their forward again in
            backward. Default False.

    On failure: ``ValueError`` if no plan fits in memory, or for wrong arguments.
    """
    counts = {
        "microbatches": microbatches,
        "stages": stages,
        "max_stages": max_stages,
        "max_replicas": max_replicas,
    }
    if isinstance(profile, Mapping):
        return _best_of(
            profile, cluster, {**counts, "split": split, "runtime": runtime, "recompute": recompute}
        )
    _check_arguments(profile, runtime, counts)
    _check_devices(profile, cluster)
    assert microbatches is not None
    most = min(max_stages or len(profile), len(profile))
    limits = Limits(
        microbatches,
        range(stages, stages + 1) if stages else range(1, most + 1),
        min(max_replicas or microbatches, microbatches, len(cluster)),
        runtime,
        split,
    )
    order = canonical_order(cluster, profile)  # see [Note: numbering]
    times_s = tuple([profile.times_s[device] for device in order]) if profile.times_s else ()
    search, packing = _searched(
        replace(profile, times_s=times_s), cluster.reordered(order), limits, recompute=recompute
    )
    baselines = search.compare([order.index(device) for device in range(len(cluster))])
    if not search.found:
        raise ValueError(_refusal(packing, profile, cluster, recompute=recompute))
    return replace(_plan_of(search, order, profile, cluster.names), baselines=baselines)


def _best_of(
    profiles: Mapping[int, Profile], cluster: DeviceCluster, options: Mapping[str, Any]
) -> Plan:
    """Return the plan with the shortest step for any of the numbers of micro-batches."""
    if options["microbatches"] is not None or not profiles:
        raise ValueError(
            "expected profiles by the number of micro-batches instead of microbatches, got "
            f"microbatches={options['microbatches']} and profiles for {sorted(profiles)}; leave "
            "microbatches out"
        )
    plans = []
    errors = []
    for count, profile in sorted(profiles.items()):
        try:
            plans.append(plan_pipeline(profile, cluster, **{**options, "microbatches": count}))
        except ValueError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    # The bound is for all numbers of micro-batches.
    bound_s = min(plan.bound_s for plan in plans)
    return replace(min(plans, key=lambda plan: plan.step_s), bound_s=bound_s)


def _check_arguments(profile: Profile, runtime: str, counts: Mapping[str, int | None]) -> None:
    for name, value in counts.items():
        is_missing = value is None and name != "microbatches"
        if not is_missing and (not isinstance(value, int) or value < 1):
            raise ValueError(f"expected {name} >= 1, got {name}={value!r}; give a whole number")
    for name in ("stages", "max_stages"):
        value = counts[name]
        if value is not None and value > len(profile):
            raise ValueError(
                f"expected at least as many layers as stages, got {name}={value} for "
                f"{len(profile)} layers; ask for fewer stages, or cut the model into more layers"
            )
    exact, most = counts["stages"], counts["max_stages"]
    if exact is not None and most is not None and exact > most:
        raise ValueError(
            f"expected stages <= max_stages, got stages={exact} and max_stages={most}; leave "
            "max_stages out"
        )
    if runtime not in _RUNTIMES:
        raise ValueError(
            f"expected a runtime of {', '.join(_RUNTIMES)}, got runtime={runtime!r}; "
            "leave it out for any"
        )


def _check_devices(profile: Profile, cluster: DeviceCluster) -> None:
    if profile.times_s and len(profile.times_s) != len(cluster):
        raise ValueError(
            f"expected times of {len(cluster)} devices in the profile, got times of "
            f"{len(profile.times_s)}; measure the profile on all ranks of the cluster"
        )
    most = max(cluster.memory_bytes)
    for layer in profile.layers:
        needed = layer.state_bytes + layer.stored_bytes
        if needed > most:
            raise ValueError(
                f"expected layers that fit on a device, got layer {layer.name!r} with "
                f"{needed:.3g} bytes and at most {most:.3g} bytes of memory; cut the layer, or use "
                "smaller micro-batches"
            )


def _searched(
    profile: Profile, cluster: DeviceCluster, limits: Limits, *, recompute: bool
) -> tuple[Search, Packing | None]:
    """Search for plans. If none is found, also return whether the layers fit in memory at all."""
    search = Search(profile, cluster, limits, recompute)
    search.run()
    if recompute:
        wide = Search(recomputing_profile(profile), cluster, limits)
        wide.run()
        ranked = sorted(wide.found, key=lambda each: each.step.step_s)
        cuts = dict.fromkeys((each.chain.stages, each.chain.split) for each in ranked)
        for cut, split in [*cuts][:_RECOMPUTED]:
            _recompute(search, cut, split)
    if search.found:
        return search, None
    packing, stages = pack(profile, cluster)
    if packing is Packing.IMPOSSIBLE and recompute:
        packing = Packing.UNKNOWN  # the sizes are those without recomputing
    if stages:
        search.add(StagedChain(profile, cluster, stages, limits.microbatches))
    return search, packing


def _recompute(search: Search, stages: Sequence[Stage], split: bool) -> None:
    """Try stages with as many recomputed layers as a full pipeline needs, and with fewest."""
    chain = StagedChain(
        search.profile, search.cluster, stages, search.limits.microbatches, split=split
    )
    for depth in dict.fromkeys((len(stages), 2, 1)):
        search.add(
            StagedChain(
                search.profile,
                search.cluster,
                stages,
                search.limits.microbatches,
                split=split,
                recomputed=recomputed_layers(chain, depth),
            )
        )


def _refusal(
    packing: Packing | None, profile: Profile, cluster: DeviceCluster, *, recompute: bool
) -> str:
    assert packing is not None
    found = packing.value
    if packing is Packing.FITS:
        found = "only plans beyond the limits on stages, replicas or runtime do"
    return (
        f"expected stages that fit in memory, got none for {len(profile)} layers on "
        f"{len(cluster)} devices: {found}; allow more, use more or larger devices, "
        f"{'or smaller micro-batches' if recompute else 'smaller micro-batches, or recompute=True'}"
    )


def _plan_of(
    search: Search, order: Sequence[int], profile: Profile, devices: Sequence[str]
) -> Plan:
    """Return the best plan, with the devices' own numbers."""
    method, chain, step = search.best()
    last_layers = [profile.layers[stage.stop - 1] for stage in chain.stages]
    stages = [
        stage._replace(devices=tuple([order[device] for device in stage.devices]))
        for stage in chain.stages
    ]
    spans = [span._replace(device=order[span.device]) for span in step.spans]
    return Plan(
        tuple(stages),
        {order[device]: list(actions) for device, actions in step.orders.items()},
        chain.microbatches,
        step.step_s,
        method,
        {},
        tuple(devices),
        tuple([layer.name for layer in profile.layers]),
        tuple([(layer.shape, layer.dtype) for layer in last_layers]),
        # Sorted by begin. The sort is stable, so the spans of a device keep their order.
        tuple(sorted(spans, key=lambda span: (span.begin_s, span.device))),
        chain.split,
        search.bound_s(),
        tuple(sorted(chain.recomputed)),
    )
