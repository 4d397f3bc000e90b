"""The engine on one large GPU, self-contained, in under five minutes: `python benchmarks/gpu.py`.

Times every pass at the heads of five model families (random weights) as a ratio to the bare cuBLAS product of the same
shape, beside the alternatives that are installed, with peak memory and agreement with the float64 definition; then one
whole pair at 7B shape, which projects the hours for all 14 pairs. Writes a JSON with the GPU's name under
benchmarks/results. `--rehearse` runs the same code at toy sizes on the CPU.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from psd_utils import Correction, HeadStatistics, Readout, head_statistics
from psd_utils.fit import FITTED_BIAS_KINDS, fits_with_penalties
from psd_utils.kernels import (
    chebyshev_betas,
    choose_backend,
    corrected_losses,
    corrected_moments,
    fit_objective,
    reference,
)
from psd_utils.objectives import StatisticsObjective

HERE = Path(__file__).parent
PUBLISHED_HOURS = 13.5  # of an A100, for 14 pairs of a million tokens
AIM_STATISTICS, AIM_HOURS = 1.3, 0.5


@dataclass(frozen=True)
class Size:
    """How large a run is."""

    heads: dict[str, tuple[int, int]]
    tokens: int
    top_k: int
    checked_tokens: int
    model: dict[str, int]
    model_tokens: tuple[int, int]  # documents × length of one forward batch
    fit_tokens: int


GPU_SIZE = Size(
    heads={
        "SmolLM2 1.7B": (49_152, 2048),
        "OLMo-2 1B": (100_352, 2048),
        "OLMo-2 7B": (100_352, 4096),
        "Qwen2.5 1.5B": (151_936, 1536),
        "Qwen2.5 7B": (152_064, 3584),
    },
    tokens=16_384,
    top_k=4096,
    checked_tokens=128,
    model={
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    model_tokens=(8, 2048),
    fit_tokens=65_536,
)
TOY_SIZE = Size(
    heads={"toy": (503, 24), "toy, wide": (301, 40)},
    tokens=96,
    top_k=40,
    checked_tokens=32,
    model={
        "vocab_size": 503,
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    model_tokens=(2, 32),
    fit_tokens=128,
)


class Clock:
    """Times calls on a device, and says when the budget is spent."""

    def __init__(self, device: torch.device, budget: float) -> None:
        self.device, self.end = device, time.perf_counter() + budget

    def synchronise(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def spent(self) -> bool:
        """Whether no time is left."""
        return time.perf_counter() > self.end

    def seconds(self, run: Callable[[], Any], repeats: int = 5) -> float:
        """Return the median time of a call after one warm-up, fewer repeats where a call is slow."""
        run()
        taken: list[float] = []
        for _ in range(repeats):
            self.synchronise()
            start = time.perf_counter()
            run()
            self.synchronise()
            taken.append(time.perf_counter() - start)
            if sum(taken) > 2.0:
                break
        return statistics.median(taken)

    def peak(self, run: Callable[[], Any]) -> int | None:
        """Return the bytes that a call adds to the device's memory at most; None on a CPU."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device) - before


@dataclass(frozen=True)
class Work:
    """Random states, head, targets and set of one shape."""

    hidden: torch.Tensor
    head: torch.Tensor
    targets: torch.Tensor
    correction: Correction

    @classmethod
    def of(cls, vocabulary: int, width: int, size: Size, device: torch.device, dtype: torch.dtype) -> "Work":
        """Draw the work of a shape."""
        g = torch.Generator(device).manual_seed(0)
        hidden = torch.randn(size.tokens, width, generator=g, device=device).to(dtype)
        head = (torch.randn(vocabulary, width, generator=g, device=device) * 3 / width**0.5).to(dtype)
        targets = torch.randint(0, vocabulary, (size.tokens,), generator=g, device=device)
        ids = torch.randperm(vocabulary, generator=g, device=device)[: size.top_k].cpu()
        return cls(hidden, head, targets, Correction(ids, torch.linspace(-2, 2, ids.numel()), 1 / 1.1))

    def statistics(self) -> HeadStatistics:
        """Make the head statistics."""
        return head_statistics(self.hidden, self.head, self.targets, self.correction.ids)

    def losses(self, n_corrections: int) -> torch.Tensor:
        """Return exact losses uncorrected, or under some corrections of different temperatures."""
        c = self.correction
        several = [Correction(c.ids, c.bias, 1 + t / 20) for t in range(n_corrections)]
        return corrected_losses(self.hidden, self.head, self.targets, several or [None])


def alternatives(work: Work) -> dict[str, Callable[[], Any] | str]:
    """Return what others offer for the same work, or the word that says why not."""

    def leaves() -> tuple[torch.Tensor, torch.Tensor]:
        return work.hidden.detach().requires_grad_(), work.head.detach()

    def torch_own(backward: bool) -> Callable[[], Any]:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2048)

        def run() -> None:
            hidden, head = leaves() if backward else (work.hidden, work.head)
            loss = torch.nn.functional.linear_cross_entropy(hidden, head, work.targets, options=options)
            if backward:
                loss.backward()

        return run

    def of_package(module: str, build: Callable[[Any], Callable[..., Any]], backward: bool) -> Any:
        try:
            function = build(importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            return f"absent: {error}"

        def run() -> None:
            hidden, head = leaves() if backward else (work.hidden, work.head)
            loss = function(hidden, head, work.targets)
            if backward:
                loss.backward()

        return run

    found: dict[str, Callable[[], Any] | str] = {}
    has_own = hasattr(torch.nn.functional, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")
    for backward, name in ((False, "forward"), (True, "forward and backward")):
        own = torch_own(backward) if has_own else f"absent: torch {torch.__version__} has none"
        found[f"torch linear_cross_entropy, {name}"] = own
        found[f"Cut Cross-Entropy, {name}"] = of_package(
            "cut_cross_entropy", lambda module: module.linear_cross_entropy, backward
        )
        found[f"Liger, {name}"] = of_package(
            "liger_kernel.transformers.functional",
            lambda module: lambda h, w, y: module.liger_fused_linear_cross_entropy(h, w, y),
            backward,
        )
    return found


def kernels(size: Size, clock: Clock, dtype: torch.dtype) -> dict[str, Any]:
    """Time every pass at every head."""
    results: dict[str, Any] = {}
    for name, (vocabulary, width) in size.heads.items():
        if clock.spent:
            results[name] = "skipped: no time left"
            continue
        work = Work.of(vocabulary, width, size, clock.device, dtype)
        backend = choose_backend(work.head, hidden=work.hidden)
        product = clock.seconds(lambda w=work: w.hidden @ w.head.T)
        stats = work.statistics()
        bias = torch.zeros(stats.ids.shape, dtype=torch.float64)
        passes: dict[str, Callable[[], Any]] = {
            "statistics": work.statistics,
            "exact loss": lambda w=work: w.losses(0),
            "nine corrections": lambda w=work: w.losses(9),
            "moments": lambda w=work: corrected_moments(w.hidden, w.head, w.targets, w.correction),
            "objective": lambda s=stats, b=bias: fit_objective(s, 1.1, b),
        }
        entry: dict[str, Any] = {
            "backend": f"{backend.name}: {backend.reason}",
            "vocabulary": vocabulary,
            "width": width,
            "tokens": size.tokens,
            "product_seconds": product,
            "ratio_to_product": {},
            "peak_bytes": {},
            "alternatives_ratio_to_product": {},
            "agreement_with_float64": agreement(work, size),
        }
        for what, run in passes.items():
            entry["ratio_to_product"][what] = clock.seconds(run) / product
            entry["peak_bytes"][what] = clock.peak(run)
        for what, other in alternatives(work).items():
            entry["alternatives_ratio_to_product"][what] = (
                other if isinstance(other, str) else tried(clock, other, product)
            )
        results[name] = entry
        del work, stats, passes
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def tried(clock: Clock, run: Callable[[], Any], product: float) -> float | str:
    """Return an alternative's ratio to the bare product, or what went wrong."""
    try:
        return clock.seconds(run) / product
    except Exception as error:  # an alternative may fail in any way; that is a result
        return f"failed: {type(error).__name__}: {str(error)[:200]}"


def agreement(work: Work, size: Size) -> dict[str, float]:
    """Return the largest differences to the float64 definition on some tokens, computed on the CPU."""
    n = size.checked_tokens
    hidden, head, targets = work.hidden[:n].cpu(), work.head.cpu(), work.targets[:n].cpu()
    truth = reference.corrected_moments(hidden, head, targets, work.correction, Readout())
    found = corrected_moments(work.hidden[:n], work.head, work.targets[:n], work.correction)
    betas = chebyshev_betas(0.4, 2.5)
    stats = head_statistics(work.hidden[:n], work.head, work.targets[:n], work.correction.ids, betas)
    true_stats = reference.head_statistics(hidden, head, targets, work.correction.ids, betas, Readout())
    rounded = torch.nn.functional.cross_entropy(
        work.correction.apply((work.hidden[:n] @ work.head.T).float().cpu()), targets, reduction="none"
    )

    def largest(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.double().cpu() - b.double()).abs().max())

    return {
        "loss": largest(found.nll, truth.nll),
        "loss_of_a_half_precision_product": largest(rounded, truth.nll),
        "expected_logit": largest(found.expected_logit, truth.expected_logit),
        "rest_log_sum": largest(stats.rest_log_sum, true_stats.rest_log_sum),
        "set_logits": largest(stats.set_logits, true_stats.set_logits),
    }


def forward_seconds(config: Any, size: Size, clock: Clock, dtype: torch.dtype) -> float:
    """Return the time of a forward pass to the final hidden states, per token, of a model with random weights."""
    with torch.device(clock.device):
        model = transformers.Qwen2Model._from_config(config, dtype=dtype).eval()
    ids = torch.randint(0, config.vocab_size, size.model_tokens, device=clock.device)
    with torch.inference_mode():
        return clock.seconds(lambda: model(input_ids=ids, use_cache=False).last_hidden_state, 3) / ids.numel()


def whole_pair(size: Size, clock: Clock, dtype: torch.dtype) -> dict[str, Any] | str:
    """Time the parts of a pair at 7B shape and project them to 14 pairs of a million tokens, all of that shape."""
    if clock.spent:
        return "skipped: no time left"
    device = clock.device
    config = transformers.Qwen2Config(**size.model)
    forward = forward_seconds(config, size, clock, dtype)
    work = Work.of(config.vocab_size, config.hidden_size, size, device, dtype)
    n = size.fit_tokens
    hidden = work.hidden.repeat(-(-n // size.tokens), 1)[:n]
    # Zipf-like targets, so that the set has counts to fit
    zipf = 1.0 / torch.arange(1, size.top_k + 1, device=device)
    targets = work.correction.ids.to(device)[torch.multinomial(zipf, n, replacement=True)]
    set_ids = targets.unique().cpu()
    stats = head_statistics(hidden, work.head, targets, set_ids)
    fits: dict[str, float] = {}
    for kind in ("temperature", *FITTED_BIAS_KINDS[:2]):
        fits[kind] = clock.seconds(lambda kind=kind: fits_with_penalties(StatisticsObjective(stats), kind), 1) / n
    per_token = {
        "forward": forward,
        "statistics": clock.seconds(work.statistics, 3) / size.tokens,
        "exact pass of nine corrections": clock.seconds(lambda: work.losses(9), 3) / size.tokens,
        "exact loss": clock.seconds(lambda: work.losses(0), 3) / size.tokens,
        "all fits": sum(fits.values()),
    }
    return {"seconds_per_token": per_token, "fits_seconds_per_token": fits, **projection(per_token)}


def projection(per_token: dict[str, float]) -> dict[str, Any]:
    """Return hours for 14 pairs: a million tokens, 450,000 fit, 50,000 select and 500,000 eval, five damaged heads."""
    fit, select, evaluation, seeds, root_steps = 450_000, 50_000, 500_000, 5, 10
    fitted = (fit + select) * per_token["statistics"] + fit * per_token["all fits"]
    exact = (fit + select + evaluation) * per_token["exact pass of nine corrections"]
    member = 1_000_000 * per_token["forward"] + fitted + exact
    damage = seeds * (fitted + exact + root_steps * fit * per_token["exact loss"])
    hours = 14 * (2 * member + damage) / 3600
    return {
        "assumed": "14 pairs all of 7B shape, both members forward, 5 damaged heads matched in 10 exact passes each",
        "projected_hours_14_pairs": hours,
        "of_it_forward": 14 * 2 * 1_000_000 * per_token["forward"] / 3600,
        "of_it_damage": 14 * damage / 3600,
        "aim_hours": AIM_HOURS,
        "published_a100_hours": PUBLISHED_HOURS,
    }


def main() -> None:
    """Run everything and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which what is left is skipped")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error("no CUDA device is available here; --rehearse runs toy sizes on the CPU")
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    size, dtype = (TOY_SIZE, torch.float32) if arguments.rehearse else (GPU_SIZE, torch.bfloat16)
    name = "CPU rehearsal" if arguments.rehearse else torch.cuda.get_device_name()
    clock = Clock(device, arguments.budget)
    started = time.perf_counter()
    results = {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "aim_of_statistics": AIM_STATISTICS,
        "whole_pair_7b": whole_pair(size, clock, dtype),
        "heads": kernels(size, clock, dtype),
    }
    results["seconds_in_all"] = time.perf_counter() - started
    out = arguments.out or HERE / "results" / f"gpu-{name.lower().replace(' ', '-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
