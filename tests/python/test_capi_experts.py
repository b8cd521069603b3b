"""Expert buffers of the C library: the example, the C++ layer, ranks in C together with ranks in Python, and GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import driver_libraries
import pytest
from c_programs import EXAMPLES, SOURCES, build
from free_ports import free_port

pytestmark = pytest.mark.timeout(900)  # the first builds the library
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_", "OMPI_", "PMIX_", "CROSSRAIL_")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
MATCHES = r"rank (\d): (expert|rank) layout, 64 tokens match the dense layer, (\d+) bytes to other ranks"
GUIDE = re.findall(r"```c\n(.*?)```", (EXAMPLES.parents[1] / "docs" / "guides" / "c.md").read_text(), re.DOTALL)
EVERY = {(str(rank), layout) for rank in range(4) for layout in ("expert", "rank")}

PYTHON_RANK = """
import ml_dtypes, numpy as np, crossrail

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK = 4, 64, 256, 16, 2
token, column = np.arange(TOKENS)[:, None], np.arange(HIDDEN)[None, :]
with crossrail.Group() as group:
    x = ((group.rank * 7 + token * 3 + column) % 17 - 8).astype(ml_dtypes.bfloat16)
    first = (group.rank * 5 + token) % EXPERTS
    topk_idx = np.concatenate([first, (first + 1 + token % (EXPERTS - 1)) % EXPERTS], axis=1).astype(np.int64)
    topk_weights = (0.25 * (1 + (token + np.arange(TOPK)) % 4)).astype(np.float32)
    factor = 1 + np.arange(EXPERTS) % 4
    mine = factor[group.rank * 4 : group.rank * 4 + 4]
    want = x.astype(np.float32) * (topk_weights * factor[topk_idx]).sum(axis=1, keepdims=True)
    with crossrail.ExpertBuffer(group, TOKENS, HIDDEN, EXPERTS, TOPK, "bf16") as buffer:
        for layout in ("expert", "rank"):
            came = buffer.dispatch(x, topk_idx, topk_weights, layout)
            rows = came.x.astype(np.float32)
            if layout == "expert":
                y = rows * mine[:, None, None]
            else:
                y = rows * (came.topk_weights * (came.topk_idx >= 0) * mine[came.topk_idx]).sum(axis=1, keepdims=True)
            sums = buffer.combine(y.astype(ml_dtypes.bfloat16), came.handle).x
            np.testing.assert_array_equal(sums.astype(np.float32), want)
            same, wire = f"{TOKENS} tokens match the dense layer", came.bytes["wire"]
            print(f"rank {group.rank}: {layout} layout, {same}, {wire} bytes to other ranks")
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(EXAMPLES / "experts.c", tmp_path_factory.mktemp("c") / "experts")


def test_the_example_starts_its_ranks(example: Path) -> None:
    ended = subprocess.run([example], env=CLEAN, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert {match[:2] for match in re.findall(MATCHES, ended.stdout)} == EVERY


@pytest.mark.parametrize("tls", ["all", "tcp"])
@pytest.mark.parametrize("in_c", [{0, 2}, {1}], ids=["c-first", "python-first"])
def test_ranks_in_c_and_in_python_share_a_buffer(example: Path, in_c: set[int], tls: str) -> None:
    """Each compares its sums with the right ones, exactly."""
    shared = CLEAN | {"WORLD_SIZE": "4", "CROSSRAIL_STORE": f"tcp://127.0.0.1:{free_port()}", "CROSSRAIL_TLS": tls}
    python = [sys.executable, "-c", PYTHON_RANK]
    ranks = [
        subprocess.Popen(
            [str(example)] if rank in in_c else python,
            env=shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    assert {match[:2] for out, _ in said for match in re.findall(MATCHES, out)} == EVERY, said


@pytest.mark.parametrize("tls", ["shm", "tcp"])
def test_the_wrapper_frees_and_throws(tmp_path: Path, tls: str) -> None:
    program = build(SOURCES / "experts_wrapper.cpp", tmp_path / "wrapper", "g++")
    command = [str(program), tls, f"tcp://127.0.0.1:{free_port()}"]
    ended = subprocess.run(command, env=CLEAN, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "good\n"), ended.stderr


def test_operations_on_a_gpu_have_the_arguments_that_they_were_given(tmp_path: Path) -> None:
    variables = driver_libraries.make("gcc", tmp_path)
    include = f"-I{driver_libraries.LAYOUT}"
    program = build(SOURCES / "gpu_experts.cpp", tmp_path / "gpu", "g++", include, "-ldl")
    ended = subprocess.run([program], env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "good\n"), ended.stderr


AROUND = """
#include <crossrail_experts.h>
#include <stdio.h>
#include <stdlib.h>
#define TRY(call) do { if ((call) < 0) { fprintf(stderr, "%s\\n", xrail_last_error()->text); exit(1); } } while (0)
enum { tokens = 3, sums_size = tokens * 256 * 2 };
static uint16_t x[tokens][256], sums[tokens][256], y[16 * 64 * 256], rows[16 * 64 * 256];
static int64_t topk_idx[tokens * 2], ranges[16];
static int32_t counts[16];
static float topk_weights[tokens * 2];
int main(void) {
    xrail_context *context;
    xrail_group *group;
    xrail_experts *experts;
    xrail_experts_options options;
    for (int at = 0; at < tokens * 2; at++) topk_idx[at] = at, topk_weights[at] = 0.5f;
    for (int at = 0; at < tokens * 256; at++) x[at / 256][at % 256] = 0x4000; /* 2 in bf16 */
    TRY(xrail_context_create(NULL, &context));
    BEFORE
    FENCE
    xrail_experts_free(experts);
    xrail_group_free(group);
    xrail_context_free(context);
    return 0;
}
"""


def in_program(before: str, fence: str, to: Path) -> Path:
    """A program of a fence of the guide, and of what it assumes."""
    text = AROUND.replace("BEFORE", before).replace("FENCE", fence)
    source = to.with_suffix(".c")
    source.write_text(text)
    return build(source, to)


def test_the_guide_on_host_memory_runs(tmp_path: Path) -> None:
    before = "xrail_exchange *dispatch, *combine; xrail_delivered in; (void)ranges, (void)counts, (void)rows;"
    experts = "memcpy(y, in.rows, in.rows_size);"
    fence = GUIDE[0].replace("/* ... the experts compute y ... */", experts)
    assert experts in fence
    fence += "for (int at = 0; at < tokens * 256; at++) if (sums[at / 256][at % 256] != 0x4000) return 1;"
    alone = CLEAN | {"RANK": "0", "WORLD_SIZE": "1", "CROSSRAIL_STORE": f"tcp://127.0.0.1:{free_port()}"}
    program = in_program(before, fence, tmp_path / "host")
    ended = subprocess.run([program], env=alone, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_guide_on_gpus_runs(tmp_path: Path) -> None:
    before = """xrail_group_options alone; xrail_enqueued *dispatch, *combine; void *stream = NULL;
    xrail_gpu_dispatch_options send; xrail_gpu_combine_options back;
    XRAIL_INIT(alone), XRAIL_INIT(options);
    alone.size = 1;
    TRY(xrail_group_join(context, &alone, &group));
    options.max_tokens = 64, options.hidden = 256, options.experts = 16, options.topk = 2;
    options.device = XRAIL_GPU(0);
    TRY(xrail_experts_create(context, group, &options, &experts));
    TRY(xrail_experts_connect(experts, NULL, 0, 0, XRAIL_DEFAULT));"""
    before += "xrail_gpu_call *sends, *returns; enum { steps = 3 };"
    prepared = f"XRAIL_INIT(back), send.stream = NULL; {GUIDE[2]}"
    program = in_program(before, GUIDE[1] + prepared, tmp_path / "gpu")
    variables = driver_libraries.make("gcc", tmp_path)
    ended = subprocess.run([program], env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
