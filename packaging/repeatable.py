"""Makes wheels reproducible: removes time and path from the bill of materials, the only part that differs.

python packaging/repeatable.py WHEEL...     rewrites each in place, and prints its SHA-256
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EPOCH = (1980, 1, 1, 0, 0, 0)


def neutral(bill: str, root: str) -> str:
    """A CycloneDX document without its serial number and time, and with `root` as /crossrail.

    Both fields are optional in CycloneDX 1.5 (https://cyclonedx.org/docs/1.5/json/).
    """
    document: dict[str, Any] = json.loads(bill.replace(f"file://{root}", "file:///crossrail"))
    document.pop("serialNumber", None)
    document.get("metadata", {}).pop("timestamp", None)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def record(members: dict[str, bytes], name: str) -> bytes:
    """The RECORD of a wheel (PEP 427): path, SHA-256 and size of every file but itself."""
    lines = []
    for path, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},,\n" if path == name else f"{path},sha256={digest},{len(data)}\n")
    return "".join(lines).encode()


def rewrite(wheel: Path, root: str = str(ROOT)) -> str:
    """Rewrites `wheel` in place; returns its SHA-256. Raises OSError, ValueError and zipfile.BadZipFile."""
    with zipfile.ZipFile(wheel) as archive:
        modes = {info.filename: info.external_attr for info in archive.infolist()}
        members = {name: archive.read(name) for name in sorted(modes)}
    for name in members:
        if ".dist-info/sboms/" in name and name.endswith(".json"):
            members[name] = neutral(members[name].decode(), root).encode()
    own = next(name for name in members if name.endswith(".dist-info/RECORD"))
    members[own] = record(members, own)
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, EPOCH)
            info.external_attr, info.compress_type = modes[name], zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    new.replace(wheel)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def main() -> int:
    """Rewrites the wheels named; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    for wheel in parser.parse_args().wheels:
        print(f"{rewrite(wheel)}  {wheel.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
