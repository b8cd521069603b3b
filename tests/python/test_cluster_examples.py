"""The examples of examples/cluster that run on one machine, and what can be checked of the others."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from free_ports import free_port

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_", "PMIX_", "CROSSRAIL_")


def environment(more: Mapping[str, str], tools: Path | None = None) -> dict[str, str]:
    """This process's environment without any launcher's variables; the command crossrail is in ``tools``.

    Unbuffered, since a line that a rank writes in two parts mixes with another rank's only then.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    path = os.pathsep.join([*([str(tools)] if tools else []), clean["PATH"]])
    return {**clean, "PATH": path, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", **more}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with the command crossrail, and a torchrun that sets the variables of the real one."""
    (tmp_path / "crossrail").write_text(f'#!/bin/sh\nexec {sys.executable} -m crossrail "$@"\n')
    (tmp_path / "torchrun").write_text(
        f"""#!/usr/bin/env bash
while [[ $1 == --* ]]; do declare "v${{1//-/_}}=$2"; shift 2; done
export WORLD_SIZE=$((v__nnodes * v__nproc_per_node)) MASTER_ADDR=$v__master_addr MASTER_PORT=$v__master_port
for ((i = 0; i < v__nproc_per_node; i++)); do
    RANK=$((v__node_rank * v__nproc_per_node + i)) LOCAL_RANK=$i {sys.executable} "$1" & pids+=($!)
done
for pid in "${{pids[@]}}"; do wait "$pid" || exit 1; done
"""
    )
    for tool in tmp_path.iterdir():
        tool.chmod(0o755)
    return tmp_path


def said_by(command: list[str], env: Mapping[str, str]) -> list[str]:
    """What the ranks of a job said, in order."""
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


def check(lines: list[str], ranks: int, launcher: str) -> None:
    """Every rank exchanged its tokens, and was told its number by ``launcher``."""
    assert len(lines) == ranks
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} of {ranks}: 32 tokens came back unchanged ({launcher}")


def test_torchrun(tools: Path) -> None:
    port = str(free_port())
    check(said_by([str(CLUSTER / "torchrun.sh")], environment({"PORT": port, "RANKS": "3"}, tools)), 3, "torchrun")


def test_open_mpi(tools: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    options = {"MPIRUN_OPTIONS": "--allow-run-as-root --oversubscribe"}
    check(said_by([str(CLUSTER / "openmpi.sh")], environment(options, tools)), 2, "Open MPI")


def test_slurm(tools: Path) -> None:
    (tools / "srun").write_text(
        f"""#!/usr/bin/env bash
[[ $1 == --ntasks-per-node=1 ]] && {{ shift 2; exec "$@"; }}
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i {sys.executable} "$2" & pids+=($!); done
for pid in "${{pids[@]}}"; do wait "$pid" || exit 1; done
"""
    )
    (tools / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    job |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost"}
    job["CROSSRAIL_SECRET_FILE"] = str(tools / "secret")
    check(said_by([str(CLUSTER / "slurm.sbatch")], environment(job, tools)), 2, "Slurm")
    assert (tools / "secret").stat().st_mode & 0o077 == 0


SSH = """#!/usr/bin/env bash
# In place of ssh: notes its arguments, and runs here what comes over stdin, without this shell's own variables.
echo "$*" >>"$SSH_NOTES"
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
shift
unset "${!CROSSRAIL_@}"
exec "$@"
"""


@pytest.fixture
def hosts(tools: Path) -> Mapping[str, str]:
    """Two hosts for hosts.sh, which are both this machine."""
    (tools / "ssh").write_text(SSH)
    (tools / "ssh").chmod(0o755)
    more = {"HOSTS": "me@localhost localhost", "LOGS": str(tools / "logs"), "PORT": str(free_port())}
    return environment({**more, "SSH_NOTES": str(tools / "notes"), "CROSSRAIL_SECRET": "of 'hosts'"}, tools)


def test_hosts_run_one_command_and_keep_their_output(hosts: Mapping[str, str]) -> None:
    command = [str(CLUSTER / "hosts.sh"), sys.executable, str(CLUSTER / "exchange.py")]
    check(said_by(command, hosts), 2, "torchrun")
    logs = sorted(Path(hosts["LOGS"]).iterdir())
    assert [log.name for log in logs] == ["0-localhost.log", "1-localhost.log"]
    for rank, log in enumerate(logs):
        assert f"rank {rank} of 2" in log.read_text()
    assert "hosts" not in Path(hosts["SSH_NOTES"]).read_text()  # the secret is in no list of arguments


def test_hosts_run_both_ends_of_a_bench(hosts: Mapping[str, str]) -> None:
    words = ["crossrail", "bench", "p2p", "--size=1M", "--transport=tcp", "--iters=2"]
    done = subprocess.run(
        [str(CLUSTER / "hosts.sh"), *words], env=hosts, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== localhost, rank 1" in done.stdout and "p2p" in done.stdout.partition("== localhost, rank 1")[2]


def test_a_host_that_fails_ends_the_others(hosts: Mapping[str, str], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    # Rank 0 says that it runs and would go on; rank 1 fails once it does.
    work = f'if [ "$RANK" = 0 ]; then echo up >{ready}; exec sleep 1000; fi; read -r _ <{ready}; echo "no disk"; exit 7'
    command = [str(CLUSTER / "hosts.sh"), "bash", "-c", work]
    done = subprocess.run(command, env=hosts, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7
    assert done.stderr.count("failed with") == 1 and "localhost (rank 1) failed with exit code 7" in done.stderr
    assert "no disk" in done.stdout
    assert [log.name for log in sorted(Path(hosts["LOGS"]).iterdir())] == ["0-localhost.log", "1-localhost.log"]


def test_ray() -> None:
    stand_in = str(Path(__file__).parent / "fake_ray")
    path = os.pathsep.join([stand_in, *filter(None, [os.environ.get("PYTHONPATH")])])
    lines = said_by([sys.executable, str(CLUSTER / "ray_group.py"), "2"], environment({"PYTHONPATH": path}))
    check(lines, 2, "torchrun")


def test_kubernetes_gives_what_a_rank_needs() -> None:
    text = (CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8")
    names = set(re.findall(r"name: ([A-Z_]+)", text))
    assert names == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CROSSRAIL_SECRET_FILE"}
    assert re.search(r"initContainers:\n +- name: check\n.*\n +command: \[crossrail, info\]", text)
    (completions,) = re.findall(r"completions: (\d+)", text)
    assert f'WORLD_SIZE, value: "{completions}"' in text
    (program,) = re.findall(r"python, /examples/cluster/(\w+\.py)", text)
    assert (CLUSTER / program).exists()


@pytest.mark.parametrize("script", ["slurm.sbatch", "torchrun.sh", "openmpi.sh", "hosts.sh"])
def test_scripts_are_valid_bash(script: str) -> None:
    assert os.access(CLUSTER / script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(CLUSTER / script)], timeout=20, check=False).returncode == 0
