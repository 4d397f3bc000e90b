"""How often does the nominal 95 % interval cover the true share?

    python scripts/coverage.py data/controls/coverage.csv

One artificial pair per true share (about 0, 0.3 and 0.9), its corrections fitted once. A text of 20,000 fresh
documents (2 million tokens) is the population: its share is the true one. Each of 2,000 worlds is a study of n
documents drawn from it, whose interval is that of `recovery_table`, to the last digit. Documents differ in length
(20 to 300 tokens) and topic (a shared part of the states), so that losses are correlated within them.

`percentile` is the interval of recovery.parquet; `expanded` is the percentile interval at the levels that make it
agree with Student's t and the unbiased variance for a mean (Hesterberg 2015, The American Statistician 69:371).
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm, t

import psd_utils as psd
from psd_utils import recovery
from psd_utils.capture import TextStates
from psd_utils.head import OutputModel
from psd_utils.kernels import Readout

VOCABULARY, WIDTH = 64, 32
FIT_TOKENS = 20_000
TOPIC = 0.6
# true share, about: (sd of a planted bias, sd of noise on the head, sd of noise on the states, kind of correction)
PAIRS = {
    0.0: (0.0, 0.0, 0.5, "bias"),
    0.3: (0.2, 0.25, 0.0, "bias_temperature"),
    0.9: (1.0, 0.0, 0.1, "bias_temperature"),
}


def draw_text(
    head: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states [tokens, width] that share a topic within a document, and labels drawn from the base."""
    topics = torch.randn(len(lengths), WIDTH, generator=generator)
    own = torch.randn(int(lengths.sum()), WIDTH, generator=generator)
    hidden = TOPIC * topics.repeat_interleave(lengths, dim=0) + (1 - TOPIC**2) ** 0.5 * own
    targets = torch.empty(len(hidden), dtype=torch.int64)
    for part in torch.arange(len(hidden)).split(200_000):
        p = (hidden[part] @ head.T).softmax(dim=1)
        targets[part] = torch.multinomial(p, 1, generator=generator)[:, 0]
    return hidden, targets


def population(share: float, n_documents: int, seed: int) -> pd.DataFrame:
    """Return loss sums of every document of a large text: `tokens` and, by member, uncorrected and corrected."""
    bias_sd, head_sd, state_sd, kind = PAIRS[share]
    generator = torch.Generator().manual_seed(seed)
    head = 0.5 * torch.randn(VOCABULARY, WIDTH, generator=generator)
    bias = bias_sd * torch.randn(VOCABULARY, generator=generator)
    damaged = head + head_sd * torch.randn(head.shape, generator=generator)
    fit_lengths = torch.full((FIT_TOKENS // 100,), 100)
    fit_hidden, fit_targets = draw_text(head, fit_lengths, generator)
    # lengths between 20 and 300, geometric mean near 80
    lengths = torch.exp(torch.randn(n_documents, generator=generator) * 0.6 + 4.4).clamp(20, 300).long()
    hidden, targets = draw_text(head, lengths, generator)
    columns = {"tokens": lengths.double()}
    for member, weight, own in (("base", head, None), ("derived", damaged, bias)):
        noise = 0.0 if member == "base" else state_sd

        def noisy(states: torch.Tensor, noise: float = noise) -> torch.Tensor:
            return states + noise * torch.randn(states.shape, generator=generator)

        readout = Readout(bias=own)
        ids = torch.arange(VOCABULARY)
        statistics = psd.head_statistics(noisy(fit_hidden), weight, fit_targets, ids, readout=readout)
        correction = psd.fit_correction(statistics, kind).correction
        keys = tuple(str(i) for i in range(n_documents))
        states = TextStates(noisy(hidden), targets, lengths, keys)
        model = OutputModel({"eval": states}, weight, readout)
        plain, corrected = states.document_sums(model.losses("eval", [None, correction]))
        columns |= {f"{member}-none": plain, f"{member}-fixed": corrected}
    return pd.DataFrame({name: values.numpy() for name, values in columns.items()})


def true_shares(text: pd.DataFrame) -> dict[str, float]:
    """Return gap, raw and symmetric share of the whole text."""
    sums = text.sum()
    gap = sums["derived-none"] - sums["base-none"]
    gain = {member: sums[f"{member}-none"] - sums[f"{member}-fixed"] for member in ("base", "derived")}
    return {
        "gap": gap / sums["tokens"],
        "raw": gain["derived"] / gap,
        "symmetric": (gain["derived"] - gain["base"]) / gap,
    }


def draw(text: pd.DataFrame, n_documents: int, n_worlds: int, seed: int) -> np.ndarray:
    """Return the places in the text of the documents of every world, [worlds, documents]."""
    return np.random.default_rng([seed, n_documents]).integers(0, len(text), size=(n_worlds, n_documents))


def loss_rows(text: pd.DataFrame, places: np.ndarray) -> pd.DataFrame:
    """Return one world as losses.parquet has it, for `recovery_table`."""
    frames = []
    for column in text.columns[1:]:
        member, kind = column.split("-")
        values = {
            "pair": "world",
            "member": member,
            "control": None,
            "damage_seed": None,
            "correction": kind,
            "setting": None,
            # keys sort as the documents were drawn
            "document": [f"d:{i:06d}:0" for i in range(len(places))],
            "split": "eval",
            "tokens": text["tokens"].to_numpy()[places],
            "loss_sum": text[column].to_numpy()[places],
        }
        frames.append(pd.DataFrame(values))
    return pd.concat(frames, ignore_index=True)


def bootstrap(text: pd.DataFrame, places: np.ndarray, n_resamples: int, seed: int) -> dict[str, np.ndarray]:
    """Return resampled gaps and shares [resamples, worlds], the resamples being those of `recovery_table`."""
    column = {name: text[name].to_numpy()[places] for name in text.columns}
    gain = {member: column[f"{member}-none"] - column[f"{member}-fixed"] for member in ("base", "derived")}
    gap = column["derived-none"] - column["base-none"]
    parts = [column["tokens"], gap, gain["derived"], gain["derived"] - gain["base"]]
    resample = recovery._Resamples(places.shape[1], n_resamples, seed)
    sums = resample.sums(np.concatenate(parts).T).reshape(n_resamples, len(parts), len(places))
    return {"gap": sums[:, 1] / sums[:, 0], "raw": sums[:, 2] / sums[:, 1], "symmetric": sums[:, 3] / sums[:, 1]}


def levels(method: str, n_documents: int) -> tuple[float, float]:
    """Return the two percentiles of an interval."""
    if method == "percentile":
        return 2.5, 97.5
    tail = 100 * norm.cdf(np.sqrt(n_documents / (n_documents - 1)) * t.ppf(0.025, n_documents - 1))
    return float(tail), float(100 - tail)


def coverage(
    n_worlds: int = 2000,
    sizes: tuple[int, ...] = (10, 20, 30, 40, 60, 100, 200),
    population_size: int = 20_000,
    n_resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Return, by true share, number of documents and method, how many of the worlds' intervals cover the truth."""
    rows = []
    for number, share in enumerate(PAIRS):
        text = population(share, population_size, seed + number)
        truth = true_shares(text)
        for n_documents in sizes:
            drawn = bootstrap(text, draw(text, n_documents, n_worlds, seed), n_resamples, seed)
            defined = np.percentile(drawn["gap"], 2.5, axis=0) > 0  # as recovery_table has it
            for method in ("percentile", "expanded"):
                row = {"share": share, "true_share": truth["symmetric"], "documents": n_documents, "method": method}
                row |= {"worlds": n_worlds, "undefined": int((~defined).sum())}
                for name, values in drawn.items():
                    low, high = np.percentile(values[:, defined], levels(method, n_documents), axis=0)
                    row[f"{name}_coverage"] = float(((low <= truth[name]) & (truth[name] <= high)).mean())
                    row[f"{name}_width"] = float((high - low).mean())
                rows.append(row)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    coverage().to_csv(target, index=False, float_format="%.5g")
