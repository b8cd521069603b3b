"""Runs one of DeepEP's own test files, unchanged, on crossrail.deep_ep.

    python tests/gpu/deepep_own.py CHECKOUT FILE [OPTION ...]

CHECKOUT is a folder with DeepEP's tests, at its last commit of the first version or at one of the second; FILE is
within it. `import deep_ep` finds crossrail-deep-ep, and beside it the helpers of DeepEP's tests that lie in
`deep_ep/utils` of the checkout. Its exit code is the file's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "packages" / "crossrail-deep-ep"
OURS = {"__init__.py", "event.py"}
"""Of the module `deep_ep.utils`: what programs import, not only tests."""
ALONE = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    # The helpers' casts are compiled otherwise, which takes longer than the tests.
    "TORCHDYNAMO_DISABLE": "1",
}


def site(folder: Path, checkout: Path) -> Path:
    """Makes a folder with the module `deep_ep`."""
    module = folder / "deep_ep"
    shutil.copytree(PACKAGE / "deep_ep", module, ignore=shutil.ignore_patterns("__pycache__"))
    for helper in sorted((checkout / "deep_ep" / "utils").glob("*.py")):
        if helper.name not in OURS:
            shutil.copy(helper, module / "utils")
    # The helpers import DeepEP's extension, of which the tests call nothing.
    (module / "_C.py").write_text("from crossrail.deep_ep import EventHandle as EventHandle\n", encoding="utf-8")
    return folder


def without_deepep(folder: Path, entries: list[str]) -> Iterator[str]:
    """These folders of modules; in place of one with another `deep_ep`, one in `folder` with all the rest of it."""
    for number, entry in enumerate(filter(None, entries)):
        if not any(Path(entry).glob("deep_ep*")):
            yield entry
            continue
        rest = folder / f"rest-{number}"
        rest.mkdir()
        for one in Path(entry).resolve().iterdir():
            if not one.name.startswith("deep_ep"):
                (rest / one.name).symlink_to(one)
        yield str(rest)


def main() -> int:
    """Runs the file to its end."""
    if len(sys.argv) < 3:
        print((__doc__ or "").splitlines()[2].strip(), file=sys.stderr)
        return 2
    checkout, options = Path(sys.argv[1]).resolve(), sys.argv[3:]
    file = checkout / sys.argv[2]
    with tempfile.TemporaryDirectory(prefix="crossrail-deepep-") as name:
        folder = Path(name)
        (folder / "site").mkdir()
        others = without_deepep(folder, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        path = [str(site(folder / "site", checkout)), *others]
        environment = {**ALONE, **os.environ, "PYTHONPATH": os.pathsep.join(path)}
        return subprocess.run([sys.executable, "-u", file, *options], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
