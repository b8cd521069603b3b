"""Methods of DeepEP's second version that are not expert parallelism: each raises NotImplementedError."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Unsupported"]


def refused(name: str, what: str) -> Any:
    """A method that raises NotImplementedError."""

    def method(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"ElasticBuffer.{name}: {what} is not part of crossrail.deep_ep")

    method.__name__ = name
    method.__doc__ = f"Not supported: raises NotImplementedError. Part of {what}."
    return method


class Unsupported:
    """Methods of other parallelisms."""

    ENGRAM, PIPELINE, GATHER = "Engram", "pipeline-parallel send and receive", "all-gather and reduce-scatter"

    get_engram_storage_size_hint = staticmethod(refused("get_engram_storage_size_hint", ENGRAM))
    engram_write = refused("engram_write", ENGRAM)
    engram_fetch = refused("engram_fetch", ENGRAM)
    get_pp_buffer_size_hint = staticmethod(refused("get_pp_buffer_size_hint", PIPELINE))
    pp_set_config = refused("pp_set_config", PIPELINE)
    pp_send = refused("pp_send", PIPELINE)
    pp_recv = refused("pp_recv", PIPELINE)
    get_agrs_num_max_session_bytes = staticmethod(refused("get_agrs_num_max_session_bytes", GATHER))
    get_agrs_buffer_size_hint = staticmethod(refused("get_agrs_buffer_size_hint", GATHER))
    create_agrs_session = refused("create_agrs_session", GATHER)
    destroy_agrs_session = refused("destroy_agrs_session", GATHER)
    agrs_new_session = refused("agrs_new_session", GATHER)
    agrs_set_config = refused("agrs_set_config", GATHER)
    agrs_get_inplace_tensor = refused("agrs_get_inplace_tensor", GATHER)
    all_gather = refused("all_gather", GATHER)
