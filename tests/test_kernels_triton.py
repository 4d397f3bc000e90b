"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled ahead of time for sm_80 and sm_90."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from psd_utils import PsdError
from psd_utils.kernels import choose_backend

pytest.importorskip("triton")

HERE = Path(__file__).parent
# shared memory that one program may use, from NVIDIA's tables
LARGEST_SHARED = {80: 163 * 1024, 90: 227 * 1024}
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async"}


def child(arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_the_kernels_agree_with_the_definition_in_the_interpreter():
    done = child(
        ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "triton_interpreted.py")],
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_triton_is_refused_by_name_where_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(PsdError, match="cannot run: Triton needs a CUDA device and these tensors are on cpu"):
        choose_backend(torch.empty(2, 2), "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(PsdError, match="float32 and these tensors float64"):
        choose_backend(torch.empty(2, 2, dtype=torch.float64), "triton")
    assert choose_backend(torch.empty(2, 2)).reason.startswith("torch tiles on cpu, since Triton needs a CUDA device")


@pytest.fixture(scope="module")
def compiled():
    """What the compiler says of every kernel, by (kernel, architecture)."""
    done = child([str(HERE / "triton_compiled.py")], TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-4000:]
    return {(entry["kernel"], entry["architecture"]): entry for entry in json.loads(done.stdout)}


KERNELS = (
    "rest bf16",
    "rest bf16 soft-capped",
    "rest bf16 weighted",
    "rest float32",
    "set bf16",
    "set float32",
    "totals",
    "gradient",
)


@pytest.mark.parametrize(("kernel", "architecture"), list(itertools.product(KERNELS, (80, 90))))
def test_every_kernel_compiles_within_the_hardware(compiled, kernel, architecture):
    entry = compiled[kernel, architecture]
    assert entry["shared"] <= LARGEST_SHARED[architecture]
    assert entry["registers"] <= 255
    assert entry["spilled_bytes"] <= 64  # a few words outside the loops at most
    if "bf16" in kernel:
        assert any(name.startswith(MATRIX_INSTRUCTION[architecture]) for name in entry["matrix_instructions"])
        assert all("bf16" in name and ".f32" in name for name in entry["matrix_instructions"])


def test_a_single_token_compiles_too(compiled):
    """Triton compiles an argument of 1 as a constant, another program."""
    assert ("rest bf16 of one token", 90) in compiled
