"""Scoring and fitting a tiny pair, as ratios to the plain way: `python benchmarks/foundation.py [--tokens 20000]`.

The plain way: scoring by transformers' own loss, one document at a time; fitting bias and temperature by torch's
L-BFGS with autograd through full logits. Both ways run alternately in one process, and the ratio is the median over
pairs of runs. The share of matrix throughput is that of the scoring's operations a second in those of a large product.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import psd_utils as psd
from psd_utils import score, study
from psd_utils.capture import plan_shards
from psd_utils.head import OutputModel, top_k_ids
from psd_utils.models import load_model
from psd_utils.settings import resolve_settings


def paired(ours: Callable[[], Any], plain: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Return the median, lowest and highest ratio plain / ours over alternating runs, after one warm-up of each."""
    ours()
    plain()
    ratios = []
    for _ in range(repeats):
        start = time.perf_counter()
        ours()
        middle = time.perf_counter()
        plain()
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return statistics.median(ratios), min(ratios), max(ratios)


def scoring(task: score.ScoringTask, device: Any, repeats: int) -> str:
    """Compare the scoring pass (states and losses, batches by length) with transformers' loss per document."""
    corpus = task.corpus
    model = load_model(task.base, device)
    own = transformers.AutoModelForCausalLM.from_pretrained(task.base.folder, dtype=torch.float32).eval()

    def ours() -> None:
        for shard in plan_shards(corpus):
            score._score_shard(model, corpus, shard, device)

    def plain() -> None:
        with torch.inference_mode():
            for d in range(len(corpus.keys)):
                ids = corpus.tokens[corpus.offsets[d] : corpus.offsets[d + 1]]
                read = torch.cat([torch.tensor([corpus.prefix_id]), ids])[None]
                own(input_ids=read, labels=read)

    ratio = paired(ours, plain, repeats)
    with FlopCounterMode(display=False) as counted:
        ours()
    share = paired(ours, _product, repeats)
    of_product = [counted.get_total_flops() / PRODUCT_FLOPS * value for value in share]
    return (
        f"scoring, tokens per second: {_words(ratio)} those of transformers {transformers.__version__} by document\n"
        f"scoring, share of the machine's matrix throughput: {of_product[0]:.0%} ({of_product[1]:.0%} to "
        f"{of_product[2]:.0%}) of that of a {PRODUCT_SIDE} x {PRODUCT_SIDE} product in float32"
    )


PRODUCT_SIDE = 2048
PRODUCT_FLOPS = 2 * PRODUCT_SIDE**3


def _product() -> None:
    square = torch.ones(PRODUCT_SIDE, PRODUCT_SIDE)
    torch.mm(square, square)


def fitting(output: OutputModel, ids: torch.Tensor, repeats: int) -> str:
    """Compare statistics and a bias-and-temperature fit with autograd through full logits, to the same objective."""
    states = output.splits["fit"]
    best: dict[str, float] = {}

    def ours() -> None:
        fit = psd.fit_correction(output.statistics("fit", ids), "bias_temperature", 1e-4)
        bias = fit.correction.bias.double()
        best["ours"] = output.mean_loss("fit", fit.correction) + 0.5e-4 * float(bias @ bias)

    def plain() -> None:
        beta = torch.ones((), requires_grad=True)
        bias = torch.zeros(ids.numel(), requires_grad=True)
        solver = torch.optim.LBFGS([beta, bias], max_iter=150, history_size=20, line_search_fn="strong_wolfe")

        def objective() -> torch.Tensor:
            solver.zero_grad()
            logits = beta * (states.hidden @ output.head.T)
            logits = logits.index_add(1, ids, bias.expand(len(logits), -1))
            loss = torch.nn.functional.cross_entropy(logits, states.targets) + 0.5e-4 * bias.square().sum()
            loss.backward()
            best["plain"] = float(loss.detach())
            return loss

        solver.step(objective)

    ratio = paired(ours, plain, repeats)
    difference = best["plain"] - best["ours"]
    return (
        f"fitting bias and temperature, statistics included: {_words(ratio)} faster than torch {torch.__version__} "
        f"L-BFGS with autograd on full logits, whose objective ends {difference:+.1e} nats away"
    )


def _words(ratio: tuple[float, float, float]) -> str:
    return f"{ratio[0]:.1f} times ({ratio[1]:.1f} to {ratio[2]:.1f})"


def main() -> None:
    """Run both comparisons on a tiny pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="tiny_instruct")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    pair = psd.load_pair(arguments.pair)
    settings = resolve_settings(pair, n_tokens=arguments.tokens, device="cpu")
    task, captures = study.score_pair(pair, settings, ("derived",))
    output = OutputModel.of(captures["derived"], torch.device("cpu"))
    ids = top_k_ids(output.splits["fit"].targets, settings.top_k, task.special, task.tokenizer_length)
    print(f"{pair.name}, {len(task.corpus.tokens)} tokens, {torch.get_num_threads()} threads")
    print(scoring(task, settings.device, arguments.repeats))
    print(fitting(output, ids, arguments.repeats))


if __name__ == "__main__":
    main()
