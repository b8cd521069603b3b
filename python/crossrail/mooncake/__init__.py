"""Mooncake's TransferEngine on Crossrail. The package crossrail-mooncake installs it under the name `mooncake`.

Any thread may call anything.
"""

from __future__ import annotations

from crossrail.mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
