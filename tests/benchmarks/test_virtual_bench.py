"""The cost of virtual ranks, over plain DDP with accumulation and over the hook alone."""

import json
from typing import Any

import pytest

from tests.harness.scripts import spawn_script
from tests.recipes import RECIPES

SMOKE = ("--blocks", "1", "--steps", "2")
OVER_DDP, OVER_HOOK = 1.05, 1.01


@pytest.mark.parametrize("ranks", [1, 2])
def test_virtual_ranks_cost_little(ranks: int, is_full: bool, benchmark: Any) -> None:
    def run() -> list[dict[str, Any]]:
        script = RECIPES / "studies" / "virtual.py"
        with spawn_script(script, ranks, args=() if is_full else SMOKE) as spawned:
            printed = "".join(spawned.wait(900.0))
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]

    rows = benchmark.pedantic(run, rounds=1, iterations=1)
    benchmark.extra_info["rows"] = rows
    of_all, of_one = [row for row in rows if row["way"] == "virtual ranks"]
    assert (of_all["virtual ranks"], of_one["virtual ranks"]) == (8, ranks)
    for row in (of_all, of_one):
        assert row["bytes"] == (pytest.approx(1.0, abs=0.005) if ranks > 1 else None)
    if is_full:
        assert of_all["over_ddp"] <= OVER_DDP, rows
        assert of_one["over_hook"] <= OVER_HOOK, rows
