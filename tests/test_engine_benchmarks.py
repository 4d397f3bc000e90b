"""The GPU benchmark's rehearsal on the CPU, and the committed results of the other benchmarks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "rehearsal.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--rehearse", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_the_gpu_benchmark_rehearses_on_the_cpu(rehearsal):
    assert rehearsal["device"] == "CPU rehearsal"
    assert len(rehearsal["heads"]) == 2
    for entry in rehearsal["heads"].values():
        assert entry["backend"].startswith("chunked")
        assert set(entry["ratio_to_product"]) == set(entry["peak_bytes"])
        assert all(ratio > 0 for ratio in entry["ratio_to_product"].values())
        assert max(entry["agreement_with_float64"].values()) < 1e-3
        for ratio in entry["alternatives_ratio_to_product"].values():
            assert isinstance(ratio, float) or ratio.startswith("absent")


def test_the_rehearsal_projects_a_whole_pair(rehearsal):
    pair = rehearsal["whole_pair_7b"]
    assert pair["projected_hours_14_pairs"] > pair["of_it_forward"] + pair["of_it_damage"] > 0
    assert set(pair["fits_seconds_per_token"]) == {"temperature", "bias", "bias_temperature"}


def test_the_gpu_benchmark_says_why_it_does_not_start_without_a_gpu():
    import torch

    if torch.cuda.is_available():
        return
    done = subprocess.run([sys.executable, str(BENCHMARKS / "gpu.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no CUDA device is available here" in done.stderr


@pytest.mark.parametrize("name", ["engine", "scaling", "temperature"])
def test_committed_results_are_ratios_with_their_setting(name):
    text = (BENCHMARKS / "results" / f"{name}.json").read_text()
    assert json.loads(text)["setting"]["torch"]
    assert "seconds" not in text
