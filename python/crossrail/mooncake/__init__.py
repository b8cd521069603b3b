"""Mooncake's TransferEngine on Crossrail. The package crossrail-mooncake installs it under the name `mooncake`."""

from __future__ import annotations

from crossrail.mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
