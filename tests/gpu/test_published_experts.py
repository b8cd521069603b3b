"""vLLM's and SGLang's own classes of experts on GPUs, unchanged, over crossrail-deep-ep.

Of their published packages: `benches/gpu/pack.sh --engines` packs what is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from deep_ep_ranks import Ranks

import crossrail

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

import published_experts as experts

PUBLISHED = Path(crossrail.__file__).parents[1] / "engines"
pytestmark = pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"there are no published packages in {PUBLISHED}")


@pytest.mark.parametrize("kind", experts.KINDS)
@pytest.mark.parametrize("program", experts.PROGRAMS)
def test_a_layer(ranks: Ranks, program: str, kind: str) -> None:
    ranks.do("published", str(PUBLISHED), program, kind)
