"""The studies of codecs on the emulated cluster, once, on the tiniest model; nothing is timed."""

from pathlib import Path

import pytest

from lab import why_not_shaped
from studies import codecs_lab
from tests.harness.campaign import IN_CAMPAIGN

_REASON = why_not_shaped()
pytestmark = [
    pytest.mark.root,
    pytest.mark.usefixtures("forked_lab"),
    pytest.mark.skipif(_REASON is not None, reason=f"no emulated network: {_REASON}"),
]


LONG = pytest.mark.skipif(not IN_CAMPAIGN, reason="only with CROSSOVER_CAMPAIGN=1: a minute each")


@pytest.mark.parametrize(
    ("study", "more", "figure"),
    [
        ("steps", ["--rate", "200", "--way", "compressed int8"], "ddp_s"),
        pytest.param("siblings", ["--ratio", "2"], "of_bound", marks=LONG),
        pytest.param("plan", ["--rate", "100"], "over_best", marks=LONG),
    ],
)
def test_the_studies_run(study: str, more: list[str], figure: str, tmp_path: Path) -> None:
    arguments = [study, "--preset", "tiny", *more, "--repeats", "1", "--steps", "2"]
    (row,) = codecs_lab.main([*arguments, "--out", str(tmp_path)])
    assert (tmp_path / f"{study}.json").exists()
    assert row[figure] > 0
    if study == "steps":
        assert row["bytes"]["compressed int8"] < 0.5, "headers weigh more in tiny buckets"
