"""Expected numbers of ranks and nodes that a token reaches.

A token selects ``topk`` experts at random, all alike: the closed forms are those of docs/plan.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """How tokens select experts.

    Out of ``groups`` of adjacent experts ``topk_groups`` are drawn, and ``topk`` of their experts. ``physical`` counts
    all copies of experts, which are spread evenly; a selection uses any copy of its expert.
    """

    experts: int
    topk: int
    physical: int
    groups: int = 1
    topk_groups: int = 1

    def reached(self, units: int) -> float:
        """How many of ``units`` ranks (or nodes), each with the same number of experts, a token reaches on average."""
        return units * (1 - self._missed(units)) if units > 1 else 1.0

    def _missed(self, units: int) -> float:
        """The probability that none of a token's selections is at one unit."""
        groups = max(1, math.ceil(self.groups / units))
        hosted = min(self.physical / units, groups * self.experts / self.groups)
        here = self.experts / (units * hosted)  # of the copies of an expert that has one in the unit
        pool = self.topk_groups * self.experts // self.groups
        missed = 0.0
        for drawn in range(min(groups, self.topk_groups) + 1):
            probability = (
                math.comb(groups, drawn)
                * math.comb(self.groups - groups, self.topk_groups - drawn)
                / math.comb(self.groups, self.topk_groups)
            )
            missed += probability * _none_of(pool, hosted * drawn / groups, self.topk, here)
        return missed


def _none_of(pool: int, hosted: float, topk: int, here: float) -> float:
    """The probability that ``topk`` different experts of ``pool`` use no copy in a unit that has ``hosted`` of them.

    A selected expert of the unit uses its copy there with the probability ``here``. A fraction of an expert is
    interpolated.
    """
    below = math.floor(hosted)
    if hosted > below:
        above = hosted - below
        return (1 - above) * _none_of(pool, below, topk, here) + above * _none_of(pool, below + 1, topk, here)
    elsewhere = max(1 - here, 0.0)
    most = min(below, topk) if elsewhere > 0 else 0
    every = math.comb(pool, topk)
    ways = ((math.comb(below, taken) * math.comb(pool - below, topk - taken), taken) for taken in range(most + 1))
    return sum(count / every * elsewhere**taken for count, taken in ways)
