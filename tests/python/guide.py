"""The commands of docs/guides/gpu.md: those of one process, and those of two ends on one machine."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PAGE = (ROOT / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")

COMMANDS: list[str] = re.findall(r"^    (crossrail .+)$", _PAGE, re.MULTILINE)
ENDS: dict[str, str] = dict(re.findall(r"^    (left|right)\$ (crossrail .+)$", _PAGE, re.MULTILINE))
NODES: dict[str, str] = dict(re.findall(r"^    (node1|node2)\$ (crossrail .+)$", _PAGE, re.MULTILINE))
