"""What the code of real pairs finds in known-answer worlds, what it should find, and whether the two agree."""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from scipy.optimize import minimize
from scipy.special import logsumexp
from tqdm.auto import tqdm

from .errors import PsdError
from .head import OutputModel, top_k_ids
from .losses import loss_rows
from .paths import project_root
from .recovery import recovery_table
from .selection import choose_corrections
from .worlds import WORLDS, Sizes, World, make_world, write_capture

KINDS = ("none", "temperature", "prior_ratio", "bias", "bias_temperature")
INDEPENDENT_KINDS = ("none", "temperature", "bias", "bias_temperature")
FOUND_COLUMNS = (
    "world",
    "seed",
    "correction",
    "gap",
    "raw_share",
    "symmetric_share",
    "temperature_base",
    "temperature_derived",
    "reason",
)


def measure(world: World, n_resamples: int = 500) -> pd.DataFrame:
    """Return what the code of real pairs finds in a world: a row per correction, λ = 0.

    Columns: `world, seed, correction, gap, raw_share, symmetric_share, temperature_base, temperature_derived, reason`;
    losses in nats per token. The world is written to a temporary folder as captures and read back.

    Raises:
        PsdError: a fit that cannot be certified, or a full disk.
    """
    frames, chosen = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for member in ("base", "derived"):
            model = OutputModel.of(write_capture(world, member, Path(folder)), torch.device("cpu"))
            chosen[member] = choose_corrections(model, _set(world, model), KINDS, penalties=(0.0,))
            corrections = {kind: c.correction for kind, c in chosen[member].items()}
            frames.append(loss_rows(model, corrections, pair=world.name, member=member, splits=("eval",)))
    table = recovery_table(pd.concat(frames), n_resamples=n_resamples, seed=world.seed)
    for member, choices in chosen.items():
        table[f"temperature_{member}"] = [choices[kind].correction.temperature for kind in table["correction"]]
    table = table.rename(columns={"pair": "world"})
    table.insert(1, "seed", world.seed)
    return table[[*FOUND_COLUMNS]]


def _set(world: World, model: OutputModel) -> torch.Tensor:
    rows = model.head.shape[0]
    return top_k_ids(model.splits["fit"].targets, rows, torch.from_numpy(world.special), rows)


def independent(world: World) -> pd.DataFrame:
    """Return the same quantities from full float64 logits and scipy's trust-region Newton method, none of our kernels.

    Columns: `world, seed, correction, expected_raw, expected_symmetric, expected_temperature`; nats per token.
    """
    ids = np.setdiff1d(np.arange(len(world.base.head)), world.special)
    targets = world.corpus.tokens.numpy()
    offsets = world.corpus.offsets.numpy()
    fit_end, select_end, end = (int(offsets[d]) for d in world.corpus.split_ends)
    splits = {"fit": slice(0, fit_end), "select": slice(fit_end, select_end), "eval": slice(select_end, end)}
    seen = np.intersect1d(ids, targets[splits["fit"]])
    losses: dict[tuple[str, str], float] = {}
    temperatures = {}
    for member, layer in (("base", world.base), ("derived", world.derived)):
        z = layer.logits()
        parts = {split: (z[part], targets[part]) for split, part in splits.items()}
        for kind in INDEPENDENT_KINDS:
            beta, bias = _newton(*parts["fit"], seen, kind)
            if _mean_loss(*parts["select"], 1.0, np.zeros(z.shape[1])) < _mean_loss(*parts["select"], beta, bias):
                beta, bias = 1.0, np.zeros(z.shape[1])
            losses[member, kind] = _mean_loss(*parts["eval"], beta, bias)
            temperatures[member, kind] = 1 / beta
    gap = losses["derived", "none"] - losses["base", "none"]
    rows = []
    for kind in INDEPENDENT_KINDS[1:]:
        gain_base, gain_derived = (losses[m, "none"] - losses[m, kind] for m in ("base", "derived"))
        rows.append(
            {
                "world": world.name,
                "seed": world.seed,
                "correction": kind,
                "expected_raw": gain_derived / gap if gap > 0 else np.nan,
                "expected_symmetric": (gain_derived - gain_base) / gap if gap > 0 else np.nan,
                "expected_temperature": temperatures["derived", kind],
            }
        )
    return pd.DataFrame(rows)


def _mean_loss(z: np.ndarray, targets: np.ndarray, beta: float, bias: np.ndarray) -> float:
    corrected = beta * z + bias
    return float((logsumexp(corrected, axis=1) - corrected[np.arange(len(z)), targets]).mean())


def _newton(z: np.ndarray, targets: np.ndarray, ids: np.ndarray, kind: str) -> tuple[float, np.ndarray]:
    """Return (β, b [vocabulary]) of least mean loss; x = (β, b on the set), each free or held by `kind`."""
    n, vocabulary = z.shape
    free = np.zeros(1 + len(ids), dtype=bool)
    free[0] = kind in ("temperature", "bias_temperature")
    free[1:] = kind in ("bias", "bias_temperature")
    start = np.concatenate(([1.0], np.zeros(len(ids))))
    if not free.any():
        return 1.0, np.zeros(vocabulary)
    target_logit = z[np.arange(n), targets].mean()
    frequencies = np.bincount(targets, minlength=vocabulary)[ids] / n

    def split(x: np.ndarray) -> tuple[float, np.ndarray]:
        full = start.copy()
        full[free] = x
        bias = np.zeros(vocabulary)
        bias[ids] = full[1:]
        return full[0], bias

    last: list[tuple[np.ndarray, np.ndarray, float]] = []

    def probabilities(x: np.ndarray) -> tuple[np.ndarray, float]:
        """Return p [tokens, vocabulary] and the mean log-sum-exp; loss, gradient and Hessian ask for the same x."""
        if not last or not np.array_equal(last[0][0], x):
            beta, bias = split(x)
            corrected = beta * z + bias
            maximum = corrected.max(axis=1)
            p = np.exp(corrected - maximum[:, None])
            sums = p.sum(axis=1)
            p /= sums[:, None]
            last[:] = [(x.copy(), p, float((np.log(sums) + maximum).mean()))]
        return last[0][1], last[0][2]

    def loss(x: np.ndarray) -> float:
        beta, bias = split(x)
        return float(probabilities(x)[1] - beta * target_logit - frequencies @ bias[ids])

    def gradient(x: np.ndarray) -> np.ndarray:
        p, _ = probabilities(x)
        slope = (p * z).sum(axis=1).mean() - target_logit
        return np.concatenate(([slope], p[:, ids].mean(axis=0) - frequencies))[free]

    def hessian(x: np.ndarray) -> np.ndarray:
        p, _ = probabilities(x)
        mean = (p * z).sum(axis=1)
        own = p[:, ids]
        h = np.empty((len(free), len(free)))
        h[1:, 1:] = np.diag(own.mean(axis=0)) - own.T @ own / n
        h[0, 1:] = h[1:, 0] = (own * (z[:, ids] - mean[:, None])).mean(axis=0)
        h[0, 0] = ((p * z**2).sum(axis=1) - mean**2).mean()
        return h[np.ix_(free, free)]

    result = minimize(loss, start[free], jac=gradient, hess=hessian, method="trust-exact", options={"gtol": 1e-9})
    return split(result.x)


def run_worlds(
    names: Iterable[str] = tuple(WORLDS),
    n_seeds: int = 20,
    n_independent: int | None = None,
    sizes: Sizes | None = None,
    n_resamples: int = 500,
) -> pd.DataFrame:
    """Return found and independently expected quantities, a row per world, seed and correction.

    Columns: those of `measure` and of `independent`, joined. Shares are fractions of the gap, gaps nats per token.
    The independent fit, the slower half, is made for the first `n_independent` seeds (None: all).

    Raises:
        PsdError: as `make_world` and `measure`; no seeds.
    """
    if n_seeds < 1:
        raise PsdError(f"n_seeds must be at least 1, found {n_seeds}")
    frames, expected = [], []
    jobs = [(name, seed) for name in names for seed in range(n_seeds)]
    for name, seed in tqdm(jobs, desc="worlds", unit="world"):
        world = make_world(name, seed, sizes)
        frames.append(measure(world, n_resamples))
        if n_independent is None or seed < n_independent:
            expected.append(independent(world))
    found = pd.concat(frames, ignore_index=True)
    if not expected:
        return found
    return found.merge(pd.concat(expected, ignore_index=True), on=["world", "seed", "correction"], how="left")


def acceptance() -> dict[str, Any]:
    """Return data/acceptance.yaml: what each world must give, and the tolerances.

    Raises:
        PsdError: there is no project root.
    """
    content: dict[str, Any] = yaml.safe_load((project_root() / "data" / "acceptance.yaml").read_text(encoding="utf-8"))
    return content


def judge(found: pd.DataFrame, claims: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """Return a row per claim about a world: `world, quantity, published, expected, found, sd, seeds, verdict`.

    `found` is the result of `run_worlds`; the claims are those of data/acceptance.yaml. `found` and `sd` are over
    seeds. The verdict is "holds", or what does not: the mean leaves its bounds, or the published single value lies
    more than two seed standard deviations from the mean.
    """
    claims = acceptance() if claims is None else claims
    rows = []
    for name, world in claims["worlds"].items():
        own = found[found["world"] == name]
        if not own.empty:
            rows += [_judged(name, own, check) for check in world["checks"]]
    return pd.DataFrame(rows)


def _judged(name: str, own: pd.DataFrame, check: Mapping[str, Any]) -> dict[str, Any]:
    column, kind = check["quantity"].split(".")
    mine = own[own["correction"] == kind]
    values = mine[column].astype(float)
    mean, sd = values.mean(), values.std(ddof=1)
    published, above = check.get("published"), check.get("published_above")
    row = {
        "world": name,
        "quantity": check["quantity"],
        "published": f"{published:g}" if published is not None else f"> {above:g}" if above is not None else "",
        "expected": check["expected"],
        "found": mean,
        "sd": sd,
        "seeds": len(values),
    }
    faults = []
    if check["expected"] == "undefined":
        without_reason = mine["reason"].isna().any()
        if values.notna().any() or without_reason:
            faults.append("a share is defined" if values.notna().any() else "undefined without a reason")
        return row | {"verdict": "; ".join(faults) or "holds"}
    if values.isna().any():
        faults.append(f"undefined for {int(values.isna().sum())} seeds")
    if check["expected"] == "independent":
        independent_column = {"symmetric_share": "expected_symmetric", "raw_share": "expected_raw"}[column]
        both = mine[mine[independent_column].notna()] if independent_column in mine else mine.iloc[:0]
        if both.empty:
            return row | {"verdict": "not judged: no seed was fitted independently"}
        row["expected"] = float(both[independent_column].mean())
        difference = float((both[column].astype(float) - both[independent_column]).abs().max())
        if not difference <= check["within"]:
            faults.append(f"differs from the independent fit by {difference:.2g}")
    if not check.get("low", -np.inf) <= mean <= check.get("high", np.inf):
        faults.append("the mean is out of bounds")
    if published is not None and len(values) < 2:
        faults.append("one seed has no spread to judge the published value by")
    elif published is not None and not abs(published - mean) <= 2 * sd:
        faults.append("the published value is more than two sd away")
    if above is not None and not mean > above:
        faults.append("the mean is not above the published bound")
    return row | {"verdict": "; ".join(faults) or "holds"}
