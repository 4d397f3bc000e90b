"""Compile every Triton kernel for sm_80 and sm_90 without a GPU and print, as JSON, what the compiler says of each.

Run by test_kernels_triton.py, or by hand: python tests/triton_compiled.py
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from psd_utils.kernels.triton import _FIT_TILE, Blocks
from psd_utils.kernels.triton_fit import gradient_kernel, totals_kernel
from psd_utils.kernels.triton_rest import rest_kernel
from psd_utils.kernels.triton_set import set_kernel

POINTERS = {
    "head_bias": "*fp32",
    "rest_ids": "*i64",
    "ids": "*i64",
    "target_columns": "*i32",
    "column_out": "*i32",
}
FLOATS = ("scale", "softcap", "exponent")
INTEGERS = (
    "n_tokens",
    "n_rest",
    "n_ids",
    "width",
    "hidden_stride",
    "head_stride",
    "tiles_per_split",
    "blocks_per_split",
)
ALIGNED = ("width", "hidden_stride", "head_stride")


def argument_type(name, dtype):
    """Return the type of a kernel's argument by its name, or "constexpr"."""
    if name.isupper():
        return "constexpr"
    if name in INTEGERS:
        return "i32"
    if name in FLOATS:
        return "fp32"
    return POINTERS.get(name, dtype if name in ("hidden", "head") else "*fp32")


def compile_kernel(kernel, dtype, constants, architecture, warps=4, stages=3, one_token=False):
    """Return the compiled kernel."""
    signature = {name: argument_type(name, dtype) for name in kernel.arg_names}
    if one_token:
        signature["n_tokens"], constants = "constexpr", {**constants, "n_tokens": 1}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ALIGNED
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def of_assembler(ptx, architecture):
    """Return (registers, bytes spilled) from ptxas -v."""
    target = re.search(r"\.target (\w+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [nvidia.get_ptxas(architecture).path, "-v", "--gpu-name", target, str(path), "-o", f"{path}.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", said).group(1))
    return registers, sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def kernels():
    """Yield (name, kernel, dtype, constants, options)."""
    for name, dtype, softcap in (
        ("bf16", torch.bfloat16, False),
        ("bf16 soft-capped", torch.bfloat16, True),
        ("float32", torch.float32, False),
    ):
        blocks = Blocks.choose(dtype, softcap)
        tile = {"TOKENS": blocks.tokens, "ROWS": blocks.rows, "DEPTH": blocks.depth}
        readout = {"HAS_BIAS": True, "HAS_CAP": softcap, "PRECISION": "ieee", "UPCAST": False}
        options = {"warps": blocks.warps, "stages": blocks.stages}
        pointer = "*bf16" if dtype == torch.bfloat16 else "*fp32"
        rest = {**tile, **readout, "NODES": 20, "COLUMNS": 32, "WEIGHTED": False}
        yield f"rest {name}", rest_kernel, pointer, rest, options
        if not softcap:
            yield f"set {name}", set_kernel, pointer, {**tile, **readout}, options
        if name == "bf16":
            weighted = {**rest, "NODES": 1, "COLUMNS": 2, "WEIGHTED": True}
            yield "rest bf16 weighted", rest_kernel, pointer, weighted, options
            yield "rest bf16 of one token", rest_kernel, pointer, rest, {**options, "one_token": True}
    fit = {"TOKENS": _FIT_TILE[0], "COLUMNS": _FIT_TILE[1]}
    yield "totals", totals_kernel, "*fp32", fit, {}
    yield "gradient", gradient_kernel, "*fp32", fit, {}


def main():
    """Compile, assemble, print."""
    entries = []
    for name, kernel, dtype, constants, options in kernels():
        for architecture in (80, 90):
            if "one token" in name and architecture == 80:
                continue
            built = compile_kernel(kernel, dtype, constants, architecture, **options)
            registers, spilled = of_assembler(built.asm["ptx"], architecture)
            entries.append(
                {
                    "kernel": name,
                    "architecture": architecture,
                    "shared": built.metadata.shared,
                    "registers": registers,
                    "spilled_bytes": spilled,
                    "matrix_instructions": sorted(
                        set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)[\w.]*", built.asm["ptx"]))
                    ),
                }
            )
    print(json.dumps(entries))


if __name__ == "__main__":
    main()
