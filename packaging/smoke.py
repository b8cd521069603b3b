"""Tries an installation of a release, in an environment that has nothing else: what was installed works from there.

python packaging/smoke.py VERSION [MODULE...]    a module: of a package that owns another project's name
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path


def transfers(tls: str) -> str:
    """Messages, a write and a read between two workers over a transport; the selection as `explain` reports it."""
    import numpy as np

    import crossrail

    context = crossrail.Context(tls=f"self,{tls}", timeout=20)
    with crossrail.Worker(context) as one, crossrail.Worker(context) as other:
        out = one.connect(other.address(), require=tls)
        source, target = np.arange(1 << 17), np.zeros(1 << 17, np.int64)
        receiving = other.recv(target, tag=7)
        out.send(source, tag=7).wait()
        assert receiving.wait().bytes == source.nbytes
        assert (source == target).all()
        region = other.register(target)
        out.write(source[::-1].copy(), region.key()).wait()
        back = np.zeros_like(source)
        out.read(back, region.key()).wait()
        assert (back == source[::-1]).all()
        return str(out.explain().large)


def experts() -> None:
    """A dispatch and a combine of one rank."""
    import ml_dtypes
    import numpy as np

    import crossrail

    x = np.ones((4, 256), ml_dtypes.bfloat16)
    chosen, weights = np.array([[0, 1]] * 4), np.full((4, 2), 0.5, np.float32)
    with crossrail.Group(size=1) as group, crossrail.ExpertBuffer(group, 4, 256, 2, 2, "bf16") as buffer:
        received = buffer.dispatch(x, chosen, weights)
        assert (buffer.combine(received.x, received.handle).x == x).all()


def main() -> None:
    """Tries everything; raises what goes wrong."""
    import crossrail

    wanted, *modules = sys.argv[1:]
    assert crossrail.__version__ == importlib.metadata.version("crossrail") == wanted
    inside = Path(crossrail.__file__).resolve()
    assert inside.is_relative_to(Path(sys.prefix).resolve()), f"{inside} is not in this environment"
    assert (inside.parent / "py.typed").exists()
    command = str(Path(sysconfig.get_path("scripts")) / "crossrail")
    said = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.strip() == f"crossrail {wanted}", said
    # What it finds is shown, as a part of the output of a check that fails.
    subprocess.run([command, "doctor", "--only", "settings,shm,tcp-loopback"], timeout=240, check=True)
    assert (Path(sys.prefix) / "share" / "man" / "man1" / "crossrail.1").exists()
    selected = [transfers(tls) for tls in ("shm", "tcp")]
    experts()
    for module in modules:
        importlib.import_module(module)
    print(f"Python {sys.version.split()[0]}, {', '.join(selected)}, experts{''.join(f', {one}' for one in modules)}")


if __name__ == "__main__":
    main()
