"""`crossrail.nixl` under the name that programs written for NIXL import."""

import sys

from nixl._only import refuse_another

refuse_another()

import crossrail.nixl as _pkg  # noqa: E402, F401
from crossrail.nixl import _api, _bindings, _utils, logging  # noqa: E402

for _name, _module in {"_api": _api, "_bindings": _bindings, "_utils": _utils, "logging": logging}.items():
    sys.modules[f"{__name__}.{_name}"] = _module
    globals().update({name: value for name, value in vars(_module).items() if not name.startswith("_")})
    # A module of that name may be among the values.
    globals()[_name] = _module
