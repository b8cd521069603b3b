"""Bills of materials meet the schema of CycloneDX, and name what is linked."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

sys.path.insert(0, str(Path(__file__).parents[2] / "packaging"))

import bills

METADATA = """Metadata-Version: 2.4
Name: crossrail
Version: 0.1.0
License-Expression: Apache-2.0
Requires-Dist: ml-dtypes>=0.5,<1
Requires-Dist: numpy>=1.24
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both bills of a release with one wheel, by their language."""
    dist = tmp_path_factory.mktemp("dist")
    with zipfile.ZipFile(dist / "crossrail-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl", "w") as archive:
        archive.writestr("crossrail-0.1.0.dist-info/METADATA", METADATA)
    paths = bills.write(dist, "0.1.0")
    return {path.name.split(".")[2].partition("-")[2]: json.loads(path.read_text(encoding="utf-8")) for path in paths}


@pytest.mark.parametrize("language", ["rust", "python"])
def test_a_bill_meets_the_schema(written: dict[str, Any], language: str) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_5)
    assert validator.validate_str(json.dumps(written[language])) is None
    broken = written[language] | {"bomFormat": "another"}
    assert validator.validate_str(json.dumps(broken)) is not None


def test_crates_have_the_sums_of_the_lock_file(written: dict[str, Any]) -> None:
    parts = {one["name"]: one for one in written["rust"]["components"]}
    assert {"crossrail-python", "crossrail", "pyo3", "libc"} <= set(parts)
    assert "crossrail-emulator" not in parts, "a dependency of tests only"
    others = [one for name, one in parts.items() if not name.startswith("crossrail")]
    assert others and all("hashes" in one and "licenses" in one for one in others)


def test_packages_have_what_they_require(written: dict[str, Any]) -> None:
    parts = {one["name"]: one for one in written["python"]["components"]}
    assert set(parts) == {"crossrail", "ml-dtypes", "numpy"}
    assert parts["numpy"]["properties"] == [{"name": "crossrail:requires", "value": "numpy>=1.24"}]
