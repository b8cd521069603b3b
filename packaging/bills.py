"""Bills of materials (CycloneDX 1.5) of a release: the Rust crates that are linked, and the Python packages needed."""

from __future__ import annotations

import email.parser
import hashlib
import json
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("crossrail-python", "crossrail-nccl-plugin", "crossrail-capi")
"""The crates that wheels and the C library contain, from which all others are reached."""
TARGET = "x86_64-unknown-linux-gnu"


def write(dist: Path, version: str) -> list[Path]:
    """Writes both bills into ``dist``. Raises OSError, ValueError and CalledProcessError."""
    made = []
    for language, components, relations in (("rust", *rust()), ("python", *python(dist))):
        path = dist / f"crossrail-{version}-{language}.cdx.json"
        document = bill(f"crossrail ({language})", version, components, relations)
        path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        made.append(path)
    return made


def bill(name: str, version: str, components: list[dict[str, Any]], relations: dict[str, list[str]]) -> dict[str, Any]:
    """A document without time and serial number, so that the same sources make the same bytes."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "library", "name": name, "version": version, "bom-ref": "crossrail"}},
        "components": sorted(components, key=lambda one: str(one["bom-ref"])),
        "dependencies": [{"ref": ref, "dependsOn": sorted(needed)} for ref, needed in sorted(relations.items())],
    }


def component(kind: str, name: str, version: str, license_: str | None, sha256: str | None) -> dict[str, Any]:
    """One package, by its package URL."""
    url = f"pkg:{kind}/{name}@{version}"
    found: dict[str, Any] = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    if license_:
        found["licenses"] = [{"expression": license_.replace("/", " OR ")}]
    if sha256:
        found["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    return found


def rust() -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """The crates that a wheel is linked from, by Cargo's own resolution; their sums are those of Cargo.lock."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", TARGET]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    packages = {one["id"]: one for one in metadata["packages"]}
    nodes = {one["id"]: one for one in metadata["resolve"]["nodes"]}
    lock = (ROOT / "Cargo.lock").read_text(encoding="utf-8")
    sums = {
        (name, version): digest
        for name, version, digest in re.findall(
            r'name = "(.+)"\nversion = "(.+)"\nsource = .+\nchecksum = "([0-9a-f]{64})"', lock
        )
    }
    reached: dict[str, list[str]] = {}
    waiting = [one for one, package in packages.items() if package["name"] in LINKED]
    roots = list(waiting)
    while waiting:
        here = waiting.pop()
        if here in reached:
            continue
        needed = [dep["pkg"] for dep in nodes[here]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
        reached[here] = needed
        waiting += needed
    parts = {}
    for one in reached:
        package = packages[one]
        key = (package["name"], package["version"])
        parts[one] = component("cargo", *key, package["license"], sums.get(key))
    relations = {parts[one]["bom-ref"]: [parts[dep]["bom-ref"] for dep in needed] for one, needed in reached.items()}
    return list(parts.values()), {"crossrail": [parts[one]["bom-ref"] for one in roots], **relations}


def python(dist: Path) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """The wheels of the release, and the packages that they require, at the versions that the tests run with."""
    pins = dict(
        re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    )
    pins = {_plain(name): version for name, version in pins.items()}
    parts: dict[str, dict[str, Any]] = {}
    relations: dict[str, list[str]] = {"crossrail": []}
    for wheel in sorted(dist.glob("*.whl")):
        head = metadata_of(wheel)
        own = component("pypi", _plain(head["Name"]), head["Version"], head["License-Expression"], None)
        own["bom-ref"] += f"?file={wheel.name}"
        own["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
        parts[own["bom-ref"]] = own
        relations["crossrail"].append(own["bom-ref"])
        relations[own["bom-ref"]] = []
        for requirement in head.get_all("Requires-Dist") or []:
            name = _plain(re.match(r"[A-Za-z0-9_.-]+", requirement)[0])  # type: ignore[index]
            if name.startswith("crossrail"):
                continue
            needed = component("pypi", name, pins[name], None, None)
            needed["properties"] = [{"name": "crossrail:requires", "value": requirement}]
            parts[needed["bom-ref"]] = needed
            relations[own["bom-ref"]].append(needed["bom-ref"])
            relations.setdefault(needed["bom-ref"], [])
    return list(parts.values()), relations


def metadata_of(wheel: Path) -> email.message.Message:
    """The metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.HeaderParser().parsestr(archive.read(name).decode())


def modules(package: Path) -> list[str]:
    """The modules at the top of a wheel, or of a source distribution that flit has made."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            names = archive.namelist()
    else:
        with tarfile.open(package) as sources:
            names = [name.partition("/")[2].removeprefix("src/") for name in sources.getnames()]
    return sorted({name.partition("/")[0] for name in names if name.endswith("/__init__.py") and name.count("/") == 1})


def _plain(name: str) -> str:
    """A distribution's name in the form in which names are compared."""
    return re.sub("[-_.]+", "-", name).lower()
