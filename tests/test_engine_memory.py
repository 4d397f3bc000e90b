"""Peak memory of every pass grows with N·(K + width), never with N × V: measured in a child process."""

import json
import subprocess
import sys

import pytest

WIDTH, N_IDS = 32, 64
PASSES = ("statistics", "losses", "moments")
CASES = [*((what, 12_000, tokens) for what in PASSES for tokens in (1024, 4096)), ("statistics", 48_000, 1024)]

CHILD = """
import json, sys, torch
from psd_utils.correction import Correction
from psd_utils.kernels import corrected_losses, corrected_moments, head_statistics

width, k, cases = json.loads(sys.argv[1])
torch.set_num_threads(1)

def resident(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

def peak(what, vocabulary, tokens):
    hidden, head = torch.randn(tokens, width), torch.randn(vocabulary, width)
    targets, ids = torch.zeros(tokens, dtype=torch.int64), torch.arange(k)
    correction = Correction(ids, torch.ones(k), 2.0)
    run = {
        "statistics": lambda n: head_statistics(hidden[:n], head, targets[:n], ids),
        "losses": lambda n: corrected_losses(hidden[:n], head, targets[:n], [None, correction]),
        "moments": lambda n: corrected_moments(hidden[:n], head, targets[:n], correction),
    }[what]
    run(8)  # what is allocated once: code, threads, libraries' workspaces
    open("/proc/self/clear_refs", "w").write("5")  # starts the peak anew
    before = resident("VmRSS")
    run(tokens)
    return resident("VmHWM") - before

print(json.dumps([peak(*case) for case in cases]))
"""


@pytest.fixture(scope="module")
def peaks():
    """Bytes that each pass adds to a process at most, by (pass, vocabulary, tokens)."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([WIDTH, N_IDS, CASES])], capture_output=True, text=True, check=False
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this kernel does not let a process reset its peak memory")
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("what", PASSES)
def test_peak_memory_does_not_hold_the_logits(peaks, what):
    small, large = peaks[what, 12_000, 1024], peaks[what, 12_000, 4096]
    assert large < 4096 * 12_000 * 4 / 8
    # three times the tokens more: their set logits, sums and states, and nothing of the size of N × V
    assert large - small < 4 * 3072 * (N_IDS + WIDTH + 100) * 4 + 2**22


def test_peak_memory_grows_with_the_vocabulary_by_the_head_alone(peaks):
    small, large = peaks["statistics", 12_000, 1024], peaks["statistics", 48_000, 1024]
    assert large - small < 36_000 * (WIDTH * 4 + 64) + 2**22
