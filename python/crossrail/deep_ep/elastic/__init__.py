"""The interface of DeepEP's second version, as far as it is expert parallelism."""

from crossrail.deep_ep.elastic.buffer import ElasticBuffer
from crossrail.deep_ep.elastic.handle import EPHandle

__all__ = ["EPHandle", "ElasticBuffer"]
