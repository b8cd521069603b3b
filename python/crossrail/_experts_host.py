"""Dispatch and combine of an expert buffer in host memory."""

from __future__ import annotations

from typing import Any

from crossrail import _calls, _native
from crossrail._arrays import shown_as, wrong
from crossrail._calls import Destinations, Sizes, number
from crossrail._results import Combined, Dispatched, Pending
from crossrail.errors import ClosedError


class HostOperations:
    """Passes calls to the native module. An invalid call is announced to the other ranks, so that they fail too."""

    def __init__(self, native: _native.ExpertBuffer, sizes: Sizes) -> None:
        self._native = native
        self._sizes = sizes

    def dispatch(self, call: _calls.DispatchCall) -> Any:
        """See `ExpertBuffer.dispatch`."""
        try:
            _refuse_others("dispatch", waits=call.waits, max_rows=call.max_rows, stream=call.stream)
            destinations = Destinations.of(self._sizes, call.layout, call.out, call.stats)
            rows, experts, weights = _calls.inputs(self._sizes, call.x, call.topk_idx, call.topk_weights, call.handle)
            unit = number("expert_alignment", call.expert_alignment, "dispatch")
            native = self._native.dispatch(rows, experts, weights, call.layout, call.handle, unit)
        except ClosedError:
            raise
        except Exception as error:
            return self._refused(self._native.refuse_dispatch(_calls.why(error)), error, call.send_only)
        show = shown_as(call.x)
        pending = Pending(native, lambda result: Dispatched(result, self._sizes, destinations, show))
        return pending if call.send_only else pending.finish()

    def combine(self, call: _calls.CombineCall) -> Any:
        """See `ExpertBuffer.combine`."""
        try:
            wire = None if call.wire == "bf16" else call.wire
            _refuse_others("combine", waits=call.waits, stream=call.stream, wire=wire)
            given = _calls.outputs(self._sizes, call.y, call.handle, call.topk_weights, call.bias, call.out)
            native = self._native.combine(*given)
        except ClosedError:
            raise
        except Exception as error:
            return self._refused(self._native.refuse_combine(_calls.why(error)), error, call.send_only)
        tokens, out, show = call.handle.tokens, call.out, shown_as(call.y)
        pending = Pending(native, lambda result: Combined(result, tokens, self._sizes.hidden, out, show))
        return pending if call.send_only else pending.finish()

    def _refused(
        self, native: _native.PendingDispatch | _native.PendingCombine, error: Exception, send_only: bool
    ) -> Pending[Any]:
        """Finishes a refused operation: the other ranks receive the error before it is raised here."""
        pending: Pending[Any] = Pending(native, _nothing, error)
        return pending if send_only else pending.finish()


def _nothing(result: object) -> None:
    """The result of an operation that was refused."""


def _refuse_others(operation: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise wrong(operation, f"{name} is for buffers on a GPU, and this one is on the host")
