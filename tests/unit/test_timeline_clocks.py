"""Clocks of made-up hosts are brought together, and the uncertainty that is stated holds."""

import math
import random
from collections.abc import Hashable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp._timeline.clocks import (
    MAX_DRIFT,
    Alignment,
    Correction,
    SeenExchange,
    align,
    seen_exchanges,
)

ROUNDING_S = 1e-6


@dataclass(frozen=True)
class Host:
    """A clock that reads ``offset_s + (1 + drift) × t`` at the true time t.

    ``lag`` and ``latency``: how late it begins and ends exchanges, in multiples of the run's.
    """

    name: str
    offset_s: float
    drift: float
    wall_error_s: float
    lag: float = 1.0
    latency: float = 1.0

    def read(self, true_s: float) -> float:
        return self.offset_s + (1 + self.drift) * true_s

    def true(self, reading_s: float) -> float:
        return (reading_s - self.offset_s) / (1 + self.drift)


@dataclass(frozen=True)
class Run:
    """Exchanges between hosts, each with its latencies; and what the hosts' clocks read."""

    hosts: list[Host]
    observed: dict[Hashable, dict[str, SeenExchange]]
    length_s: float

    def align(self) -> Alignment:
        extents_s = {host.name: (host.read(0.0), host.read(self.length_s)) for host in self.hosts}
        walls_s = {host.name: host.wall_error_s - host.offset_s for host in self.hosts}
        return align(walls_s, self.observed, extents_s)

    def error_s(self, alignment: Alignment, name: str, true_s: float) -> float:
        """Return how far the host's corrected reading is from the anchor's at the same moment, in the common time."""
        correct = alignment.corrections[name]
        own, anchor = (next(h for h in self.hosts if h.name == n) for n in (name, correct.anchor))
        return correct(own.read(true_s)) - alignment.corrections[anchor.name](anchor.read(true_s))


def made_up(
    hosts: list[Host],
    *,
    seed: int,
    exchanges: int,
    length_s: float,
    latency_s: float,
    groups: int = 1,
    even: bool = False,
) -> Run:
    """Let all hosts of a group begin an exchange at their own moments; it ends after all have begun.

    ``even``: nothing is left to chance, so that the truth may lie on the very edge of what is permitted.
    """
    chance = random.Random(seed)
    seen = []
    for number in range(exchanges):
        at_s = length_s * number / exchanges
        # Groups overlap in one host, as jobs on some of the nodes do.
        size = math.ceil(len(hosts) / groups) + 1
        first = (number % groups) * (size - 1)
        members = hosts[first : first + size] if groups > 1 else hosts
        begins_s = [
            at_s + host.lag * (latency_s if even else chance.expovariate(1 / latency_s)) for host in members
        ]
        for host, begin_s in zip(members, begins_s, strict=True):
            end_s = max(begins_s) + host.latency * latency_s * (1 if even else 0.1 + chance.random())
            seen.append((number, host.name, host.read(begin_s), host.read(end_s)))
    return Run(hosts, seen_exchanges(seen), length_s + 10 * latency_s)


hosts = st.lists(
    st.builds(
        Host,
        name=st.just(""),
        offset_s=st.floats(-1e6, 1e6),
        drift=st.floats(-0.4 * MAX_DRIFT, 0.4 * MAX_DRIFT),
        wall_error_s=st.floats(-10, 10),
        lag=st.sampled_from([0, 1, 2, 3]),
        latency=st.sampled_from([0, 1, 5]),
    ),
    min_size=2,
    max_size=5,
).map(lambda drawn: [replace(host, name=f"h{place}") for place, host in enumerate(drawn)])


@settings(max_examples=100, deadline=None)
@given(
    hosts,
    st.integers(0, 2**32),
    st.integers(1, 60),
    st.sampled_from([0.5, 60.0, 3600.0]),
    st.sampled_from([1e-4, 1e-2, 0.3]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_hosts_are_brought_back_within_the_stated_uncertainty(
    hosts: list[Host],
    seed: int,
    exchanges: int,
    length_s: float,
    latency_s: float,
    groups: int,
    even: bool,
) -> None:
    run = made_up(
        hosts,
        seed=seed,
        exchanges=exchanges,
        length_s=length_s,
        latency_s=latency_s,
        groups=groups,
        even=even,
    )
    alignment = run.align()
    assert alignment.corrections.keys() == {host.name for host in hosts}
    assert alignment.contradiction_s == 0
    assert alignment.out_of_order == 0
    for host in hosts:
        correct = alignment.corrections[host.name]
        if correct.anchor == host.name:
            continue
        assert correct.uncertainty_s is not None
        for share in (0.0, 0.3, 1.0):
            error_s = run.error_s(alignment, host.name, share * run.length_s)
            assert abs(error_s) <= correct.uncertainty_s + ROUNDING_S


def test_no_smaller_uncertainty_would_be_true() -> None:
    """Every latency is in one direction: the truth is on the edge, and the error is what was stated."""
    pair = [Host(name, 0.0, 0.0, 0.0, lag=place, latency=0.0) for place, name in enumerate("ab")]
    run = made_up(pair, seed=0, exchanges=40, length_s=40.0, latency_s=0.01, even=True)
    alignment = run.align()
    assert alignment.uncertainty_s == pytest.approx(0.005, rel=0.1)  # at the run's ends a little more
    assert abs(run.error_s(alignment, "b", 20.0)) == pytest.approx(0.005, rel=0.05)


def test_a_clock_behind_a_doubtful_one_is_more_doubtful() -> None:
    chain = [Host(name, 0.0, 0.0, 0.0, lag=place, latency=0.0) for place, name in enumerate("abcd")]
    pairs = [
        made_up(chain[place : place + 2], seed=0, exchanges=count, length_s=40, latency_s=0.01, even=True)
        for place, count in enumerate((80, 40, 20))
    ]
    observed = {(place, key): seen for place, pair in enumerate(pairs) for key, seen in pair.observed.items()}
    run = Run(chain, observed, 40.1)
    alignment = run.align()
    assert alignment.corrections["d"].anchor == "b"
    errors_s = [abs(run.error_s(alignment, name, 20.0)) for name in "acd"]
    assert errors_s == pytest.approx([0.005, 0.005, 0.01], rel=0.05)
    doubts_s = [alignment.corrections[name].uncertainty_s for name in "acd"]
    assert doubts_s == pytest.approx([0.005, 0.005, 0.01], rel=0.2)


def test_a_rate_that_few_exchanges_leave_open_is_part_of_the_uncertainty() -> None:
    hosts = [Host("a", 0.0, 0.0, 0.0), Host("b", 0.0, 0.0, 0.0)]
    run = Run(hosts, made_up(hosts, seed=0, exchanges=1, length_s=1, latency_s=1e-3).observed, 3600.0)
    assert run.align().uncertainty_s == pytest.approx(MAX_DRIFT * 3600, rel=0.05)


def test_many_exchanges_tell_more_than_one_exchange_takes() -> None:
    """Also over an hour in which the clocks drift apart by 180 times of what is claimed in the end."""
    hosts = [Host("a", 100.0, 0.0, 0.0), Host("b", -5e5, 50e-6, 3.0), Host("c", 7.0, -30e-6, -2.0)]
    run = made_up(hosts, seed=1, exchanges=4000, length_s=3600.0, latency_s=2e-3)
    alignment = run.align()
    assert alignment.uncertainty_s is not None
    assert alignment.uncertainty_s < 1e-3
    assert alignment.exchanges == 4000
    errors_s = [run.error_s(alignment, name, share * 3600) for name in "bc" for share in (0, 0.5, 1)]
    assert max(map(abs, errors_s)) < 5e-4
    assert alignment.corrections["b"].wall_error_s == pytest.approx(3.0, abs=0.2)


def test_a_moment_in_the_common_time_is_the_reference_clocks_reading() -> None:
    run = made_up(
        [Host("a", 5.0, 0.0, 0.0), Host("b", 9.0, 0.0, 0.0)], seed=2, exchanges=5, length_s=1, latency_s=1
    )
    alignment = run.align()
    assert alignment.corrections[alignment.reference](12.5) == 12.5


def test_one_clock_needs_no_exchange() -> None:
    alignment = align({"a": 10.0}, {}, {"a": (0.0, 1.0)})
    assert alignment.corrections == {"a": Correction("a", "a", 0.0, uncertainty_s=0.0)}
    assert (alignment.islands, alignment.uncertainty_s) == (1, 0.0)
    assert align({}, {}, {}).corrections == {}


def test_without_a_common_exchange_the_wall_clock_decides_and_nothing_is_claimed() -> None:
    alignment = align({"a": 10.0, "b": 4.0}, {}, {"a": (0.0, 1.0), "b": (0.0, 1.0)})
    assert alignment.islands == 2
    assert alignment.uncertainty_s is None
    assert alignment.corrections["b"](3.0) == 3.0 + 4.0 - 10.0
    assert alignment.corrections["b"].wall_error_s is None


def test_two_islands_are_each_aligned_and_not_with_each_other() -> None:
    names = "abcd"
    made = [Host(name, 10.0 * place, 0.0, 0.5 * place) for place, name in enumerate(names)]
    left = made_up(made[:2], seed=3, exchanges=9, length_s=1, latency_s=1e-3).observed
    right = made_up(made[2:], seed=4, exchanges=5, length_s=1, latency_s=1e-3).observed
    observed = {**left, **{("right", key): seen for key, seen in right.items()}}
    alignment = Run(made, observed, 1.1).align()
    assert [alignment.corrections[name].anchor for name in names] == ["a", "a", "c", "c"]
    assert alignment.uncertainty_s is None
    assert all(alignment.corrections[name].uncertainty_s is not None for name in names)
    run = Run(made, observed, 1.1)
    for name in "bd":
        assert abs(run.error_s(alignment, name, 0.5)) < 2e-3


def test_bounds_from_one_side_leave_the_wall_clock_its_word_as_far_as_they_permit() -> None:
    """As when one rank owns every bucket: nobody else's end proves anything."""

    def one_sided(wall_s: float) -> Correction:
        observed = {0: {"a": SeenExchange(1.0, 1.5), "b": SeenExchange(1.2, math.inf)}}
        return align({"a": 0.0, "b": wall_s}, observed, dict.fromkeys("ab", (0.0, 2.0))).corrections["b"]

    assert one_sided(0.1).offset_s == 0.1
    assert one_sided(7.0).offset_s == pytest.approx(0.3, abs=1e-5)  # b began before a ended
    assert one_sided(7.0).uncertainty_s is None


def test_a_clock_that_was_set_is_a_contradiction_and_not_hidden() -> None:
    run = made_up([Host("a", 0, 0, 0), Host("b", 0, 0, 0)], seed=5, exchanges=40, length_s=10, latency_s=1e-3)
    jumped = {
        key: {"a": seen["a"], "b": SeenExchange(*(at + (0.25 if at > 5 else 0.0) for at in seen["b"]))}
        for key, seen in run.observed.items()
    }
    alignment = Run(run.hosts, jumped, 10.0).align()
    # The best straight line halves the jump.
    assert 0.05 < alignment.contradiction_s < 0.25
    assert alignment.uncertainty_s is None


def test_exchanges_out_of_order_on_one_clock_are_counted() -> None:
    observed = {
        0: {"a": SeenExchange(2.0, 1.0)},
        1: {"a": SeenExchange(1.0, 2.0)},
        2: {"a": SeenExchange(1.0, math.inf)},
    }
    assert align({"a": 0.0}, observed, {"a": (0.0, 3.0)}).out_of_order == 1


def test_ranks_on_one_clock_are_one_witness() -> None:
    seen = [("x", "a", 1.0, 4.0), ("x", "a", 2.0, 5.0), ("x", "a", 1.5, math.inf), ("x", "b", 0.0, 1.0)]
    assert seen_exchanges(seen) == {"x": {"a": SeenExchange(2.0, 4.0), "b": SeenExchange(0.0, 1.0)}}
