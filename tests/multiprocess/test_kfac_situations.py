"""K-FAC in situations that the conformance table has not, between two ranks."""

import pytest
import timm
import torch
import torchvision
from torch import Tensor
from torch.distributed.algorithms.join import Join

from tests.harness import run_ranks
from tests.multiprocess.kfac_training import Training


def train_unevenly(rank: int, world_size: int, decoupled: bool) -> list[float]:
    """Rank 1 has inputs for fewer steps; return the losses, and the sum of all parameters.

    Input factors leave early, which those of a deferred step cannot.
    """
    training = Training(rank, decoupled=decoupled, inv_update_steps=2)
    found = [training.step() for _ in range(3)]
    if not decoupled:
        training.kfac.plan_factors(early=True)
    with Join([training.model]):
        for _ in range(4 if rank == 0 else 2):
            found.append(training.step())
    assert training.kfac.stats().items() >= {"strained": 0, "dropped": 0}.items()
    assert training.kfac.steps == 7
    return [*found, float(training.parameters().sum())]


@pytest.mark.parametrize("decoupled", [False, True], ids=["early", "decoupled"])
def test_join_with_uneven_inputs_ends_with_the_same_model(decoupled: bool) -> None:
    first, second = run_ranks(train_unevenly, 2, args=(decoupled,))
    assert (len(first), len(second)) == (8, 6)
    assert all(0 < value < float("inf") for value in first[:-1])
    assert first[-1] == second[-1]


def images(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def smoke(rank: int, world_size: int, name: str) -> tuple[str, int, float]:
    """Train three steps; return the report, the number of layers, and a sum over all parameters."""
    torch.manual_seed(0)
    if name == "vit":
        network = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10, drop_path_rate=0.0
        )
    else:
        network = torchvision.models.resnet18(num_classes=10)
    # The widest layers take seconds each to invert.
    options = {"damping": 0.03, "inv_update_steps": 2, "skip": ["layer[34]*"]}
    training = Training(rank, network, data=images, ddp={"bucket_cap_mb": 25}, **options)
    for of_step in training.trained(3):
        assert of_step.keys() == dict(network.named_parameters()).keys()
        assert all(torch.isfinite(gradient).all() for gradient in of_step.values())
    assert training.kfac.stats()["dropped"] == 0
    return training.kfac.report(), len(training.kfac.owners), float(training.parameters().double().sum())


@pytest.mark.parametrize(
    ("name", "layers", "lines"),
    [
        ("vit", 1 + 2 * 4 + 1, ["blocks.1.mlp.fc2: A 769, G 192, rank "]),
        (
            "resnet18",
            1 + 4 + 5 + 1,
            ["layer2.1.conv2: A 1152, G 128, rank ", "layer4.1.conv2.weight passes through: named in skip"],
        ),
    ],
)
def test_models_of_other_libraries(name: str, layers: int, lines: list[str]) -> None:
    (report, count, total), (_, _, of_other) = run_ranks(smoke, 2, args=(name,), timeout_s=120)
    assert total == of_other
    assert count == layers
    for line in [*lines, "passes through: not Linear or Conv2d", "rank 1 works for "]:
        assert line in report
