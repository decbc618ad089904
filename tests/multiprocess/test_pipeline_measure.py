"""Profiles and clusters that all ranks measure together, on gloo and on NCCL."""

import itertools
import json
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.pipeline import Cluster, Plan, Profile, cluster
from tests.harness import in_ranks, spawn_script

SMALL: dict[str, Any] = {"size_bytes": 1 << 16, "repeats": 1}


def layers(width: int = 8) -> list[nn.Module]:
    return [nn.Linear(8, width), nn.ReLU(inplace=True), nn.Linear(width, 4)]


@in_ranks(3)
def test_all_ranks_measure_the_same_profile(rank: int) -> dict[str, Any]:
    profile = Profile.measure(layers(), torch.randn(2, 8), process_group=dist.group.WORLD)
    assert len(profile.times_s) == 3
    for row in profile.times_s:
        assert all(forward_s > 0 and backward_s > 0 for forward_s, backward_s in row[::2])
    assert profile.times_s[0] == tuple((each.forward_s, each.backward_s) for each in profile.layers)
    assert Profile.from_json(profile.to_json()) == profile
    return profile.to_json()


@in_ranks(3)
def test_ranks_of_a_group_measure_without_the_others(rank: int) -> None:
    group = dist.new_group([2, 0])
    assert isinstance(group, dist.ProcessGroup) == (rank != 1)
    if isinstance(group, dist.ProcessGroup):
        profile = Profile.measure(layers(), torch.randn(2, 8), repeats=1, process_group=group)
        found = Cluster.measure(group, **SMALL, nodes=("x", "y"))
        assert (len(profile.times_s), len(found)) == (2, 2)
        assert found.nodes == ("x", "y")


@in_ranks(2)
def test_all_ranks_raise_if_one_cannot_measure(rank: int) -> None:
    width = 8 + rank
    with pytest.raises(ValueError, match="the same layers on all ranks, got others on ranks"):
        Profile.measure(layers(width), torch.randn(2, 8), process_group=dist.group.WORLD)
    message = r"on all ranks, got rank 1: .*layer '0', which refuses shape=\(2, 9\)"
    with pytest.raises(ValueError, match="got layer '0', which refuses" if rank else message):
        Profile.measure(layers(), torch.randn(2, 8 + rank), process_group=dist.group.WORLD)
    with pytest.raises(UnsupportedConfigurationError, match="expected the same nodes on all ranks"):
        Cluster.measure(nodes=("a", str(rank)), **SMALL)
    with pytest.raises(ValueError, match=r"expected nodes of 2 ranks, got nodes=\('a',\)"):
        Cluster.measure(nodes=("a",), **SMALL)


@in_ranks(4)
def test_disjoint_pairs_are_measured_at_the_same_time(rank: int) -> Any:
    """Four ranks of one node need three rounds. On two nodes, pairs wait for the network cards."""
    with mock.patch.object(cluster, "_wait_for_all", wraps=cluster._wait_for_all) as rounds:
        one = Cluster.measure(**SMALL)
        assert rounds.call_count == 3
        two = Cluster.measure(**SMALL, nodes=("x", "x", "y", "y"), names=tuple("abcd"))
        assert rounds.call_count == 3 + 1 + 4
    assert one.nodes == (socket.gethostname(),) * 4
    assert (two.nodes, two.names) == (("x", "x", "y", "y"), ("a", "b", "c", "d"))
    for each in (one, two):
        for a, b in itertools.permutations(range(4), 2):
            assert each.rate(a, b) > 1e5
            assert 0 <= each.latency(a, b) < 10
    return one.to_json(), two.to_json()


@pytest.mark.fake_cuda
@in_ranks(2, backend="nccl")
def test_profiles_and_clusters_are_measured_on_devices_of_nccl(rank: int) -> Any:
    torch.cuda.set_device(rank)
    chain = layers()
    before = torch.cuda.get_rng_state(rank)
    profile = Profile.measure(
        [*chain, nn.Dropout()],
        torch.randn(2, 8),
        device=f"cuda:{rank}",
        dtype=torch.bfloat16,
        process_group=dist.group.WORLD,
    )
    assert torch.equal(torch.cuda.get_rng_state(rank), before)
    assert all(parameter.device.type == "cpu" for parameter in nn.ModuleList(chain).parameters())
    assert {each.dtype for each in profile.layers} == {"bfloat16"}
    assert len(profile.times_s) == 2
    found = Cluster.measure(**SMALL)
    assert found.rate(0, 1) > 0 < found.rate(1, 0)
    return profile.to_json(), found.to_json()


def test_the_command_measures_on_all_ranks_and_plans_on_the_first(tmp_path: Path) -> None:
    saved = {name: tmp_path / f"{name}.json" for name in ("plan", "profile")}
    words = ["plan", f"{__name__}:layers", "--input", "2,8", "--cluster", "measure"]
    words += ["--microbatches", "4", "--save", str(saved["plan"])]
    words += ["--save-profile", str(saved["profile"])]
    with spawn_script("-m", 2, args=["crossover_ddp.cli", *words]) as ranks:
        first, second = ranks.wait(120)
    assert "4 micro-batches" in first
    assert "layer 3 of 3, 2: forward" in first
    assert second == ""
    assert Plan.load(saved["plan"]).devices == ("0", "1")
    profile = Profile.load(saved["profile"])
    assert len(profile.times_s) == 2
    # A saved profile is not measured. The cluster's file has the devices.
    (tmp_path / "c.json").write_text(json.dumps({"devices": 2, "bandwidth_gbit": 1}))
    words = ["plan", str(saved["profile"]), "--cluster", str(tmp_path / "c.json")]
    with spawn_script("-m", 2, args=["crossover_ddp.cli", *words, "--microbatches", "2"]) as ranks:
        first, second = ranks.wait(120)
    assert "2 micro-batches" in first
    assert "layer 3" not in first
    assert second == ""
