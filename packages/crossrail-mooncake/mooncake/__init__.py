"""`crossrail.mooncake` under the name that programs written for Mooncake's transfer engine import."""

from crossrail._drop_in import alias, refuse_another

refuse_another(
    "mooncake",
    __file__,
    [f"mooncake-transfer-engine{variant}" for variant in ("", "-cuda13", "-non-cuda")],
)

from crossrail.mooncake import engine  # noqa: E402

alias(__name__, {"engine": engine})
