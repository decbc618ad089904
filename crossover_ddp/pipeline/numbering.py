"""Orders devices by their properties, so that plans do not depend on their numbers. Pure.

Devices get a colour by their own properties. Then colours are refined: two devices keep the same
colour only if they have the same links to devices of the same colours. Where devices still have
the same colour, one of them is chosen to come first, and colours are refined again. This is the
refinement of Weisfeiler and Leman (1968). Devices that remain alike are interchangeable in all but
contrived clusters, so the choice does not matter.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from .cluster import DeviceCluster
from .profile import Profile


def canonical_order(cluster: DeviceCluster, profile: Profile) -> list[int]:
    """Return the devices in an order that depends only on their properties."""
    count = len(cluster)
    properties = [
        (
            -cluster.speed[device],
            cluster.memory_bytes[device],
            cluster.cards.get(cluster.nodes[device], 0.0),
            profile.times_s[device] if profile.times_s else (),
        )
        for device in range(count)
    ]
    links = [
        [
            (
                cluster.nodes[one] != cluster.nodes[two],
                cluster.rate(one, two),
                cluster.rate(two, one),
                cluster.latency(one, two),
                cluster.latency(two, one),
            )
            for two in range(count)
        ]
        for one in range(count)
    ]
    # Numbers stand for the properties of links, since they are compared often.
    numbers = _ranks([link for row in links for link in row])
    pairs = [numbers[one * count : (one + 1) * count] for one in range(count)]
    colours = _refined(_ranks(properties), pairs)
    while len(set(colours)) < count:
        tied = min(colour for colour in colours if colours.count(colour) > 1)
        # Colours become even numbers, so that the chosen device fits in before those like it.
        chosen = colours.index(tied)
        colours = [2 * colour for colour in colours]
        colours[chosen] -= 1
        colours = _refined(_ranks(colours), pairs)
    return sorted(range(count), key=lambda device: colours[device])


def _ranks(values: Sequence[Any]) -> list[int]:
    """Return the place of each value among the different values, in ascending order."""
    places: dict[Hashable, int] = {value: n for n, value in enumerate(sorted(set(values)))}
    return [places[value] for value in values]


def _refined(colours: list[int], pairs: Sequence[Sequence[int]]) -> list[int]:
    """Refine colours until all devices of a colour have the same links to each colour."""
    count = len(colours)
    while True:
        seen = [
            (
                colours[one],
                tuple(
                    sorted((pairs[one][two], colours[two]) for two in range(count) if two != one)
                ),
            )
            for one in range(count)
        ]
        finer = _ranks(seen)
        if len(set(finer)) == len(set(colours)):
            return finer
        colours = finer
