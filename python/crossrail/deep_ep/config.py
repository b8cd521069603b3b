"""DeepEP's kernel configuration. Most fields tune queues that this library does not have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from crossrail.deep_ep.checks import count, wrong

__all__ = ["Config", "recommended"]

_SIDE_BYTES = 32 * 12
"""Expert ids and weights of a row, for the most experts that a token may have."""


@dataclass(frozen=True)
class Config:
    """Multiprocessors per operation, `num_sms`; all other fields are accepted and have no effect.

    Rows are written directly to their destination in the receiver's memory: there are no queues to tune. Raises
    UsageError for invalid numbers."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if count(name, getattr(self, name), "Config") == 0:
                raise wrong("Config", f"{name} is 0")
        for link in ("nvl", "rdma"):
            send, receive = (f"num_max_{link}_chunked_{way}_tokens" for way in ("send", "recv"))
            if getattr(self, send) > getattr(self, receive):
                raise wrong("Config", f"{send} {getattr(self, send)} is more than {receive} {getattr(self, receive)}")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for `num_nvl_bytes`: one queue of rows per source rank for every second multiprocessor.

        `hidden_bytes`: bytes of a row; `num_ranks`: ranks of the group. Raises UsageError for numbers below 0.
        """
        rows = count("num_ranks", num_ranks, "Config") * (self.num_sms // 2) * self.num_max_nvl_chunked_recv_tokens
        row = count("hidden_bytes", hidden_bytes, "Config") + hidden_bytes // 64 + _SIDE_BYTES
        return rows * (-(-row // 128) * 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for `num_rdma_bytes`: none, rows for other nodes leave from the same memory.

        `hidden_bytes`, `num_ranks`: as for `get_nvl_buffer_size_hint`.
        """
        count("num_ranks", num_ranks, "Config")
        count("hidden_bytes", hidden_bytes, "Config")
        return 0


@cache
def recommended(num_ranks: int, num_sms: int) -> Config:
    """The default Config of dispatch and combine."""
    if not 1 <= count("num_ranks", num_ranks, "Config") <= 1024:
        raise wrong("Config", f"{num_ranks} ranks; supported are 1 to 1024")
    return Config(num_sms)
