"""The study of Muon on the emulated cluster, once, on the tiniest model; nothing is timed."""

import json
from pathlib import Path

import pytest

from lab import why_not_shaped
from studies import muon

_REASON = why_not_shaped()
pytestmark = [
    pytest.mark.root,
    pytest.mark.usefixtures("forked_lab"),
    pytest.mark.skipif(_REASON is not None, reason=f"no emulated network: {_REASON}"),
]


def test_the_study_runs(tmp_path: Path) -> None:
    arguments = ["--preset", "tiny", "--ratio", "0", "--repeats", "1", "--steps", "2"]
    (row,) = muon.main([*arguments, "--out", str(tmp_path)])
    assert json.loads((tmp_path / "muon.json").read_text())[0]["preset"] == "tiny"
    assert row["calls_per_matrix"] == 1.0
    assert row["wire_ratio"] < 0.85, "headers weigh more in tiny buckets"
    assert 0.5 <= row["busiest_share"] <= 0.56
