"""Two connected workers, as most tests of the API want them."""

from __future__ import annotations

from typing import NamedTuple

import crossrail


class Pair(NamedTuple):
    """Two workers of this process and the endpoints between them."""

    context: crossrail.Context
    a: crossrail.Worker
    b: crossrail.Worker
    to_b: crossrail.Endpoint
    to_a: crossrail.Endpoint
