"""Faults of kfac."""

from typing import Final

from tests.seeded.fault import Fault

_KFAC = "tests/multiprocess/test_kfac.py"
_DEFECTS = "tests/defects/test_kfac.py"

KFAC: Final[tuple[Fault, ...]] = (
    Fault(
        "columns of more than two ranks are scaled as those of two",
        "crossover_ddp/_kfac/factor_traffic.py",
        "math.sqrt(1 / len(shares))",
        "math.sqrt(1 / 2)",
        (_KFAC, "-k", "independent and 4"),
    ),
    Fault(
        "a factor that only some ranks have is not divided by their number",
        "crossover_ddp/_kfac/factor_traffic.py",
        ".div_(total[-1])",
        ".div_(2)",
        (_KFAC, "-k", "independent and uneven"),
    ),
    Fault(
        "the KL clip's sum is that of rank 0's layers alone",
        "crossover_ddp/_kfac/journeys.py",
        "sums.sum().abs()",
        "sums[0].abs()",
        (_KFAC, "-k", "independent and -2"),
    ),
    Fault(
        "of a spread layer's rows only the first one counts for the KL clip",
        "crossover_ddp/_kfac/journeys.py",
        "(made * turned).sum(",
        "(made * turned)[:1].sum(",
        (_KFAC, "-k", "independent and spread"),
    ),
    Fault(
        "factors are weighed as the old mean is",
        "crossover_ddp/_kfac/factor_traffic.py",
        'add(halves["a"], halves["g"], decay)',
        'add(halves["a"], halves["g"], 1 - decay)',
        (_KFAC, "-k", "independent and seldom"),
    ),
    Fault(
        "the KL clip has the first step's learning rate for good",
        "crossover_ddp/_kfac/preconditioner.py",
        "else self.rates()",
        "else self.__dict__.setdefault('_first', self.rates())",
        ("tests/conformance/test_conformance.py", "-k", "gloo-kfac-schedule"),
    ),
    Fault(
        "factors travel in steps that take none, too",
        "crossover_ddp/_kfac/journeys.py",
        "takes, inverts = step % int(every) == 0,",
        "takes, inverts = True,",
        ("tests/journeys/test_bits_and_buffers.py", "-k", "bytes_on and seldom"),
    ),
    Fault(
        "directions that wait for the step are preconditioned again",
        "crossover_ddp/_kfac/capture.py",
        "if added is not None and bool(added):",
        "if added is None and bool(added):",
        (_DEFECTS, "-k", "wait_for_the_step"),
    ),
    Fault(
        "a gradient that was cleared through p.grad.data counts as left",
        "crossover_ddp/_kfac/capture.py",
        "left = gradient.detach().any()",
        "left = gradient.new_ones(1).any()",
        (_DEFECTS, "-k", "cleared"),
    ),
    Fault(
        "a layer of which one parameter never comes stays as each rank has it",
        "crossover_ddp/_kfac/preconditioner.py",
        "if 0 < len(missing) < len(named):",
        "if len(missing) > len(named):",
        (_DEFECTS, "-k", "never_comes"),
    ),
    Fault(
        "factors are computed with CROSSOVER_DISABLE=1, too",
        "crossover_ddp/_kfac/preconditioner.py",
        "self.capture.active = now.takes_factors and not environment.is_set(environment.DISABLE)",
        "self.capture.active = now.takes_factors",
        (_DEFECTS, "-k", "disabled"),
    ),
    Fault(
        "factors are taken and solvers made after close()",
        "crossover_ddp/_kfac/preconditioner.py",
        "self._closed = True",
        "self._closed = False",
        (_DEFECTS, "-k", "closed"),
    ),
    Fault(
        "nobody is told that no layer was seen",
        "crossover_ddp/_kfac/capture.py",
        "if self._seen == {False} and",
        "if self._seen == {False, True} and",
        (_DEFECTS, "-k", "without_any_factor"),
    ),
    Fault(
        "a layer's input is called input",
        "crossover_ddp/_kfac/capture.py",
        "args or kwargs.values()",
        'args or (kwargs["input"],)',
        (_DEFECTS, "-k", "keyword"),
    ),
    Fault(
        "a weight that is used beside its layer goes unnoticed",
        "crossover_ddp/_kfac/capture.py",
        "uses[self._layers[index].weight] > n",
        "uses[self._layers[index].weight] < n",
        (_DEFECTS, "-k", "beside_its_module"),
    ),
    Fault(
        "the KL clip takes the weight's learning rate for the bias",
        "crossover_ddp/_kfac/journeys.py",
        "if self.bias is None or self.bias_lr == self.lr:",
        "if self.bias is None or self.lr:",
        (_KFAC, "-k", "independent and rates"),
    ),
    Fault(
        "a layer is spread although its bias has a learning rate of its own",
        "crossover_ddp/_kfac/preconditioner.py",
        "if solver is not None and bias_lr == lr else",
        "if solver is not None else",
        (_KFAC, "-k", "independent and rates and spread"),
    ),
    Fault(
        "ranks with other arguments train on",
        "crossover_ddp/_kfac/settings.py",
        "compare(group, {**arguments, ",
        "compare(group, {",
        ("tests/multiprocess/test_kfac_faults.py", "-k", "other_layers"),
    ),
    Fault(
        "Adam is taken for an optimizer that leaves directions as they are",
        "crossover_ddp/_kfac/settings.py",
        '("adam", "rmsprop",',
        '("rmsprop",',
        (_DEFECTS, "-k", "divides"),
    ),
)
