"""The marker `inside` finds whoever knows the engine, and nobody else."""

from pathlib import Path

import pytest

from tests.harness.net import is_inside

OUR_ENGINE = ".".join(("crossover_ddp", "_engine"))  # in pieces, or this module would be inside
PUBLIC_MODULE = ".".join(("crossover_ddp", "comm_hooks"))
FILES = {
    "crossover_ddp/comm_hooks.py": "from ._engine.hook import Exchange, Hook\n"
    "from ._system import device\n__all__ = ['Hook']",
    "tests/harness/inside.py": f"import {OUR_ENGINE}.exchange\n",
    "tests/unit/helper.py": f"from {OUR_ENGINE}.links import Layout\n",
    "tests/unit/worker.py": f"import {OUR_ENGINE}\n",
}
INSIDE = {
    "an import": f"import {OUR_ENGINE}.exchange",
    "an import of some of it": "from crossover_ddp._kfac import journeys",
    "by a helper": "from tests.unit.helper import f",
    "by a neighbour": "from .helper import f",
    "by a script": 'run("worker.py")',
    "by a module that is run": 'run("-m", "tests.unit.worker")',
    "in a script's text": f'run("import {OUR_ENGINE}")',
    "a patched name": f'patch("{OUR_ENGINE}.exchange.Exchange")',
    "by a public module": f'patch("{PUBLIC_MODULE}.Exchange.of")',
    "an import by a public module": "from crossover_ddp.comm_hooks import Exchange",
    "in a public module": 'from crossover_ddp import comm_hooks\npatch.setattr(comm_hooks, "Exchange", x)',
}
PUBLIC = {
    "a public name": "from crossover_ddp.comm_hooks import crossover_hook",
    "a public name of the engine": "from crossover_ddp.comm_hooks import Hook",
    "a leaf": "from crossover_ddp._kfac.factors import precondition",
    "a leaf by a public module": 'patch("crossover_ddp.comm_hooks.device")',
    "what knows it for all": "from tests.harness.inside import refuse_bucket",
    "a docstring": f'def f():\n    """Like {OUR_ENGINE}.exchange."""',
    "other packages": "import tests_engine, torch._dynamo",
}


@pytest.mark.parametrize("why", [*INSIDE, *PUBLIC])
def test_who_knows_the_engine_is_inside(why: str, tmp_path: Path) -> None:
    test = tmp_path / "tests/unit/test_it.py"
    for name, source in {**FILES, "tests/unit/test_it.py": {**INSIDE, **PUBLIC}[why]}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    assert is_inside(test, tmp_path) == (why in INSIDE)
