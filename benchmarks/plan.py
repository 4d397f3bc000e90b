"""The planner against a tiny pair that really runs: `python benchmarks/plan.py [--tokens 20000]`, one thread.

Operations are counted as they happen: torch's FlopCounterMode for the models, a wrapper around the product with the
head, which oneDNN computes out of that counter's sight. Processor time is compared with operations over the speed of a
plain product, measured in the same process; disk with the files. Ratios are found / planned.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import setting, write
from torch.utils.flop_counter import FlopCounterMode

import psd_utils as psd
from psd_utils import plan, score, selection, study
from psd_utils.kernels import chunked
from psd_utils.settings import resolve_settings


def attention_operations(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Return the operations of both products of attention, from shapes [batch, heads, positions, width]."""
    batch, heads, positions, width = query
    return 2 * batch * heads * positions * key[2] * (width + value[3])


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Count operations of matrix products, and processor seconds, while the block runs."""
    found = {"operations": 0.0}
    real = chunked.linear

    def product(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found["operations"] += 2 * states.shape[0] * states.shape[1] * weight.shape[0]
        return real(states, weight)

    chunked.linear = product
    start = time.process_time()
    try:
        attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_operations}
        with FlopCounterMode(display=False, custom_mapping=attention) as counter:
            yield found
    finally:
        chunked.linear = real
    found["seconds"] = time.process_time() - start
    found["operations"] += counter.get_total_flops()


def products_a_second(width: int, rows: int) -> float:
    """Return the operations a second of a plain float32 product of this width."""
    states, head = torch.randn(1024, width), torch.randn(rows, width).to_mkldnn()
    best = 0.0
    for _ in range(5):
        start = time.process_time()
        for _ in range(10):
            torch.nn.functional.linear(states.to_mkldnn(), head)
        best = max(best, 10 * 2 * states.numel() * rows / (time.process_time() - start))
    return best


def compare(what: str, run: Callable[[], Any], cost: plan.Cost, machine: plan.Machine) -> dict[str, Any]:
    """Run a step; return and print found / planned."""
    with counted() as found:
        run()
    expected = cost.seconds(replace(machine, start_seconds=0.0))
    ratios = {
        "operations": round(found["operations"] / cost.operations, 3),
        "processor_seconds": round(found["seconds"] / expected, 2),
    }
    print(f"{what}: {ratios['operations']} times the planned operations, {ratios['processor_seconds']} times the time")
    return ratios


def main() -> None:
    """Compare every step of one tiny pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="tiny_math")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=1, help="damaged models")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pair = psd.load_pair(given.pair)
    settings = resolve_settings(pair, n_tokens=given.tokens, device="cpu")
    shape = plan.shape_of(pair.base, pair.facts)
    size = plan.Size(given.tokens, settings.top_k, given.seeds, itemsize=4)
    task = score.prepare(pair, None, given.tokens)
    attended = float((task.corpus.lengths.double() ** 2).sum() / task.corpus.lengths.sum())
    speed = products_a_second(shape.width, shape.rows)
    machine = replace(plan.MACHINES["cpu core"], peak=speed, share=1.0)
    results: dict[str, Any] = {"setting": setting(), "pair": pair.name, "tokens": given.tokens, "damaged": given.seeds}
    with tempfile.TemporaryDirectory() as folder:
        captures = Path(folder) / "captures"
        cost = plan.step_cost("score", shape, size, attended)
        capture = score.score_member(task, "base", settings.device, captures / "warm")
        step = lambda: score.score_member(task, "base", settings.device, captures / "timed")  # noqa: E731
        results["score"] = compare("score", step, cost, machine)
        disk = sum(path.stat().st_size for path in capture.folder.iterdir())
        results["score"]["disk"] = round(disk / cost.disk, 3)
        print(f"disk of a capture: {results['score']['disk']} times the planned bytes")
        study.score_pair(pair, settings)
        wanted = {"n_tokens": given.tokens, "device": "cpu", "n_damage_seeds": given.seeds, "n_resamples": 100}
        cost = plan.step_cost("fit", shape, size)
        results["fit"] = compare("fit", lambda: psd.run_study(pair, **wanted, out_dir=f"{folder}/a"), cost, machine)
        # as for a large vocabulary: the bias on all tokens by exact passes
        usual = selection.STATISTICS_BUDGET, plan.STATISTICS_BUDGET
        selection.STATISTICS_BUDGET = plan.STATISTICS_BUDGET = 4 * (settings.top_k + 1) * given.tokens
        try:
            cost = plan.step_cost("fit", shape, size)
            step = lambda: psd.run_study(pair, **wanted, out_dir=f"{folder}/b")  # noqa: E731
            results["fit_by_exact_passes"] = compare("fit, the bias on all tokens by exact passes", step, cost, machine)
        finally:
            selection.STATISTICS_BUDGET, plan.STATISTICS_BUDGET = usual
    write("plan", results)


if __name__ == "__main__":
    main()
