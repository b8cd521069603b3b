"""`crossrail.nixl` under the name that programs written for NIXL import."""

from crossrail._drop_in import alias, refuse_another

refuse_another("nixl", __file__, ["nixl"])

import crossrail.nixl as _pkg  # noqa: E402
from crossrail.nixl import _api, _bindings, _utils, logging  # noqa: E402

for _module in (_api, _bindings, _utils, logging):
    globals().update({name: value for name, value in vars(_module).items() if not name.startswith("_")})
# Among these values is Python's own module logging.
alias(__name__, {name: getattr(_pkg, name) for name in ("_api", "_bindings", "_utils", "logging")})
