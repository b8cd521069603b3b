"""The image, the manifests and the dashboard of examples/cluster, each by the validator of its kind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
SCHEMAS = ROOT / "tests" / "data" / "schemas"
KUBERNETES = "1.30"
"""The oldest release whose schema the manifests must meet."""
DOCKERFILE = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((CLUSTER / "grafana.json").read_text(encoding="utf-8"))
MANIFESTS = ["jobset.yaml", "kubernetes.yaml"]


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of a manifest."""
    return list(yaml.safe_load_all((CLUSTER / name).read_text(encoding="utf-8")))


def schema(name: str) -> Any:
    """A validator by a schema of tests/data/schemas."""
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8")))


def jobs(name: str) -> list[dict[str, Any]]:
    """The Jobs of a manifest: on their own, or within a JobSet."""
    found = [one for one in documents(name) if one["kind"] == "Job"]
    for job_set in documents(name):
        for one in job_set["spec"].get("replicatedJobs", []) if job_set["kind"] == "JobSet" else []:
            template = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one["name"]}} | one["template"]
            found.append(template)
    return found


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    """The linter's report on a Dockerfile."""
    command = [str(Path(sys.executable).with_name("hadolint")), "--no-color", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_the_image_passes_the_linter() -> None:
    done = hadolint(DOCKERFILE)
    assert done.returncode == 0, done.stdout
    broken = hadolint(DOCKERFILE.replace("USER 10001:10001", "USER root"))
    assert broken.returncode != 0 and "DL3002" in broken.stdout


def test_the_image_runs_as_nobody_special_and_asks_the_doctor() -> None:
    (user,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    assert int(user) >= 1000
    assert re.search(r'^HEALTHCHECK (?:.*\\\n)*.*CMD \["crossrail", "doctor"', DOCKERFILE, re.MULTILINE)
    for name in MANIFESTS[:1]:
        for job in jobs(name):
            pod = job["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsUser"] == int(user)
            assert pod["securityContext"]["runAsNonRoot"] is True


def test_the_image_has_this_version_and_what_it_depends_on() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.MULTILINE) == [version[1]]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (dependencies,) = re.findall(r"^dependencies = (\[.*\])$", project, re.MULTILINE)
    (installed,) = re.findall(r"pip install --no-cache-dir (\".*\") \\\n", DOCKERFILE)
    assert sorted(json.loads(dependencies)) == sorted(re.findall(r'"(.*?)"', installed))
    for name in MANIFESTS:
        text = (CLUSTER / name).read_text(encoding="utf-8")
        assert set(re.findall(r"image: registry\.example\.com/crossrail:(\S+)", text)) == {version[1]}


@pytest.mark.parametrize("name", MANIFESTS)
def test_objects_meet_the_schema_of_kubernetes(name: str) -> None:
    plain = [one for one in documents(name) if "jobset" not in one["apiVersion"]]
    for one in [*plain, *jobs(name)]:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_a_wrong_field_is_noticed() -> None:
    (job,) = jobs("jobset.yaml")
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolice"):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_the_job_set_meets_its_schema() -> None:
    (job_set,) = [one for one in documents("jobset.yaml") if one["kind"] == "JobSet"]
    schema("jobset").validate(job_set)


def test_the_policy_opens_the_ports_of_the_ranks_and_of_the_metrics_only() -> None:
    (policy,) = [one for one in documents("jobset.yaml") if one["kind"] == "NetworkPolicy"]
    (job,) = jobs("jobset.yaml")
    (rank,) = job["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in rank["env"]}
    first, last = map(int, env["CROSSRAIL_PORTS"].split("-"))
    metrics = int(env["CROSSRAIL_METRICS"].rpartition(":")[2])
    opened = [port for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    ranks = {"protocol": "TCP", "port": first, "endPort": last}
    assert opened == [ranks, {"protocol": "TCP", "port": metrics}]
    assert policy["spec"]["egress"][0]["ports"] == [ranks]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    (name,) = [one["metadata"]["name"] for one in documents("jobset.yaml") if one["kind"] == "JobSet"]
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    assert chosen == {"jobset.sigs.k8s.io/jobset-name": name}
    assert all(peer["podSelector"]["matchLabels"] == chosen for peer in policy["spec"]["ingress"][0]["from"])
    assert env["MASTER_ADDR"] == f"{name}-rank-0-0.crossrail"
    assert env["WORLD_SIZE"] == str(job["spec"]["completions"])


def test_the_dashboard_meets_its_schema() -> None:
    schema("dashboard").validate(DASHBOARD)
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))


def test_every_expression_of_the_dashboard_is_promql_over_metrics_that_exist() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    known = dict(re.findall(r"^\| `(crossrail_\w+)` \| (\w+) \|", page, re.MULTILINE))
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m")
            promql_parser.parse(expression)
            for name in re.findall(r"crossrail_\w+", expression):
                histogram = name.removesuffix("_bucket")
                assert name in known or known.get(histogram) == "histogram", expression
    with pytest.raises(ValueError):
        promql_parser.parse("sum by host (rate(crossrail_errors_total[1m])")
