"""Faults of kfac."""

from typing import Final

from tests.seeded.fault import Fault

_KFAC = "tests/multiprocess/test_kfac.py"
_ROWS = "tests/multiprocess/test_kfac_rows.py"

KFAC: Final[tuple[Fault, ...]] = (
    Fault(
        "columns of more than two ranks are scaled as those of two",
        "crossover_ddp/_kfac/packing.py",
        "(self.world_size / weight).sqrt()",
        "(2 / weight).sqrt()",
        (_KFAC, "-k", "independent and 4"),
    ),
    Fault(
        "a factor that only some ranks have is not divided by their number",
        "crossover_ddp/_kfac/packing.py",
        "return unpack_triangle(body, self.groups, self.dim) / weight",
        "return unpack_triangle(body, self.groups, self.dim)",
        (_KFAC, "-k", "without_a_layer"),
    ),
    Fault(
        "the KL clip's sum is that of rank 0's layers alone",
        "crossover_ddp/_kfac/payload.py",
        "total = torch.stack([message.kl_sum for message in messages]).sum().abs()",
        "total = messages[0].kl_sum.abs()",
        (_KFAC, "-k", "independent and -2"),
    ),
    Fault(
        "a block of rows is multiplied as soon as its first row has arrived",
        "crossover_ddp/_kfac/row_product.py",
        "if rows.stop * width > numel:",
        "if rows.start * width > numel:",
        (_ROWS, "-k", "arrive"),
    ),
    Fault(
        "of a spread layer's rows only the first block counts for the KL clip",
        "crossover_ddp/_kfac/spread_payload.py",
        "return torch.stack(terms).sum() * layer.lr**2 if terms else None",
        "return terms[0] * layer.lr**2 if terms else None",
        (_ROWS, "-k", "dominant"),
    ),
    Fault(
        "factors that trail are weighed as the old mean is",
        "crossover_ddp/_kfac/late.py",
        "self._curvatures[layer].add(a, g, decay)",
        "self._curvatures[layer].add(a, g, 1 - decay)",
        ("tests/multiprocess/test_kfac_late.py", "-k", "train_the_same"),
    ),
    Fault(
        "the KL clip has the first step's learning rate for good",
        "crossover_ddp/_kfac/rounds.py",
        "self._lrs = self._learning_rates(now.kl_clip is not None)",
        "self._lrs = self._lrs or self._learning_rates(now.kl_clip is not None)",
        ("tests/multiprocess/test_kfac_situations.py", "-k", "scheduler"),
    ),
    Fault(
        "the room for factors travels in steps that take none, too",
        "crossover_ddp/_kfac/payload.py",
        "self._with_factors = plan.takes_factors and plan.factors_travel",
        "self._with_factors = plan.factors_travel",
        ("tests/multiprocess/test_kfac_wire.py",),
    ),
)
