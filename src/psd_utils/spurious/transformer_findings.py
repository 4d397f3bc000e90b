"""From the transformer's runs to the numbers that the acceptance table asks for.

In: tidy tables of transformer_runs. Out: a summary of every run, and findings, name -> values over seeds. A number
whose run was too short is left out, and the acceptance table says "not run".
"""

import numpy as np
import pandas as pd

from psd_utils.spurious.acceptance import Findings, data_folder
from psd_utils.spurious.findings import rebound

GATE = 0.9
"""Recall of the new people that ends the event: the trough is sought before it, or erosion would be taken for it."""


def load_runs(*parts: str) -> pd.DataFrame:
    """Recorded runs of the small study: parts of data/spurious/transformer_run (main, more, cues, surgery, doses,
    frozen), one under the other. scripts/record_spurious_runs.py makes them.

    Raises:
        FileNotFoundError: a part that was not recorded.
    """
    folder = data_folder() / "transformer_run"
    missing = [part for part in parts if not (folder / f"{part}.csv").is_file()]
    if missing:
        raise FileNotFoundError(
            f"No {missing[0]}.csv in {folder}; scripts/record_spurious_runs.py {missing[0]} makes it."
        )
    return pd.concat([pd.read_csv(folder / f"{part}.csv") for part in parts], ignore_index=True)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row for each run.

    Args:
        table: the rows of run_conditions.

    Returns:
        condition, seed, start, trough (lowest recall of A until the new people's reaches GATE), trough_step,
        new_at_trough, B_at_trough, common_removed and common_only at the trough, max_after (highest recall of A from
        the trough on), recovery (max_after − trough), end, gate_step (NaN if never), shift_peak, shift_peak_step,
        shift_fall (share of the peak that is withdrawn at the lowest point after it), content_peak, drift_end.
    """
    groups = table.groupby(["condition", "seed"], sort=False)
    rows = [{"condition": c, "seed": s, **_summary(run.sort_values("step"))} for (c, s), run in groups]
    return pd.DataFrame(rows)


def _summary(run: pd.DataFrame) -> dict[str, float]:
    recall, new, steps = (run[name].to_numpy(float) for name in ("recall_A", "recall_new", "step"))
    learned = np.flatnonzero(new >= GATE)
    until = int(learned[0]) if len(learned) else len(new) - 1
    low = int(recall[: until + 1].argmin())
    shift = run["shift"].to_numpy(float)
    top = int(shift.argmax())
    at_trough = run.iloc[low]
    return {
        "start": recall[0],
        "trough": recall[low],
        "trough_step": steps[low],
        "new_at_trough": new[low],
        "B_at_trough": at_trough["recall_B"],
        "common_removed": at_trough["recall_common_removed"],
        "common_only": at_trough["recall_common_only"],
        "max_after": recall[low:].max(),
        "recovery": recall[low:].max() - recall[low],
        "end": recall[-1],
        "gate_step": steps[until] if len(learned) else np.nan,
        "shift_peak": shift[top],
        "shift_peak_step": steps[top],
        "shift_fall": 1 - shift[top:].min() / shift[top] if shift[top] > 0 else 0.0,
        "content_peak": run["content"].max(),
        "drift_end": run["drift"].iloc[-1],
    }


def mean_run(table: pd.DataFrame, condition: str) -> pd.DataFrame:
    """Mean over seeds of one condition, a row for every step that all its runs share; with condition and seed −1.

    Raises:
        ValueError: the table has no such condition.
    """
    part = table[table["condition"] == condition]
    if part.empty:
        raise ValueError(f"No run of {condition!r}; the table has {', '.join(table['condition'].unique())}.")
    counts = part.groupby("step")["seed"].nunique()
    shared = part[part["step"].isin(counts[counts == part["seed"].nunique()].index)]
    means = shared.drop(columns=["condition", "seed"]).groupby("step").mean().reset_index()
    return means.assign(condition=condition, seed=-1)


def cue_summary(table: pd.DataFrame) -> pd.DataFrame:
    """The summary of runs whose new names give answers away, with kind ("value", "region") and cue (0–1).

    Runs of B_prime in the table stand for cue 0 of both kinds.
    """
    parts = summary(table[table["condition"].str.fullmatch(r"cue_(value|region)_[\d.]+")])
    names = parts["condition"].str.extract(r"cue_(?P<kind>\w+)_(?P<cue>[\d.]+)")
    parts = parts.assign(kind=names["kind"], cue=names["cue"].astype(float))
    none = summary(table[table["condition"] == "B_prime"]).assign(cue=0.0)
    return pd.concat([none.assign(kind="value"), none.assign(kind="region"), parts], ignore_index=True)


def transformer_findings(runs: pd.DataFrame, doses: pd.DataFrame | None = None, prefix: str = "small") -> Findings:
    """Numbers of rows 34 to 37b (small study) and 38 to 40 (full study), as far as the runs allow.

    A collapse and its rebound are judged on the mean curve, which noise of single seeds does not raise; what single
    seeds do is reported beside it.

    Args:
        runs: B_prime, and C, no_final_norm and mlp where they were run.
        doses: the dose conditions beside B_prime, or None; they are compared over the seeds they share with it.
        prefix: what the names begin with.
    """
    found: dict[str, np.ndarray] = {}
    here = set(runs["condition"])
    if "B_prime" in here:
        found |= _of_b_prime(runs)
    if "C" in here:
        mean = mean_run(runs, "C")
        found |= {f"C.A_{step}": _at(mean, "recall_A", step) for step in (200, 600)}
        found["C.rebound"] = _one(rebound(mean["recall_A"].to_numpy()))
        early = mean[mean["step"] <= 600]
        found["C.A_minus_B"] = _one((early["recall_A"] - early["recall_B"]).abs().max())
    if "no_final_norm" in here:
        found |= _of_no_final_norm(runs)
    if "mlp" in here:
        mean = summary(mean_run(runs, "mlp"))
        found |= {f"mlp.{name}": mean[name].to_numpy(float) for name in ("trough", "trough_step", "max_after")}
    if doses is not None:
        base = runs[(runs["condition"] == "B_prime") & runs["seed"].isin(doses["seed"])]
        every = pd.concat([base, doses])
        means = pd.concat([mean_run(every, name) for name in every["condition"].unique()])
        table = summary(means)
        found["doses.new_at_trough_spread"] = _one(np.ptp(table["new_at_trough"]))
        found["doses.first_trough_step"] = _one(table["trough_step"].min())
        found["doses.last_trough_step"] = _one(table["trough_step"].max())
    return {f"{prefix}.{name}": values for name, values in found.items() if np.isfinite(values).all()}


def _of_b_prime(runs: pd.DataFrame) -> dict[str, np.ndarray]:
    seeds, mean = summary(runs[runs["condition"] == "B_prime"]), mean_run(runs, "B_prime")
    curve = summary(mean)
    names = ("start", "trough", "trough_step", "new_at_trough", "max_after", "shift_peak")
    found = {f"B_prime.{name}": curve[name].to_numpy(float) for name in names}
    found["B_prime.rebound"] = curve["recovery"].to_numpy(float)
    found["B_prime.seed_rebound"] = seeds["recovery"].to_numpy(float)
    found["B_prime.seed_trough"] = seeds["trough"].to_numpy(float)
    found["B_prime.A_1200"] = _at(mean, "recall_A", 1200)
    for name in ("shift_fall", "common_removed", "common_only"):
        found[f"B_prime.{name}"] = seeds[name].to_numpy(float)
    found["B_prime.drift_dip"] = _dip(mean["drift"])
    found["B_prime.drift_1200"] = _at(mean, "drift", 1200)
    return found


def _of_no_final_norm(runs: pd.DataFrame) -> dict[str, np.ndarray]:
    mean = mean_run(runs, "no_final_norm")
    return {
        "no_final_norm.start": _at(mean, "recall_A", 0),
        "no_final_norm.shift_dip": _dip(mean["shift"]),
        "no_final_norm.rebound": _one(rebound(mean["recall_A"].to_numpy())),
        "no_final_norm.A_600": _at(mean, "recall_A", 600),
        "no_final_norm.new_600": _at(mean, "recall_new", 600),
        "no_final_norm.A_1200": _at(mean, "recall_A", 1200),
    }


def _dip(curve: pd.Series) -> np.ndarray:
    """The largest fall of a curve below its highest point so far, as a share of its maximum."""
    values = curve.to_numpy(float)
    return _one((np.maximum.accumulate(values) - values).max() / values.max() if values.max() > 0 else 0.0)


def _at(mean: pd.DataFrame, column: str, step: int) -> np.ndarray:
    """The value at a step, NaN where the run has no such step."""
    values = mean.loc[mean["step"] == step, column].to_numpy(float)
    return values if len(values) else _one(np.nan)


def _one(value: float) -> np.ndarray:
    return np.atleast_1d(np.asarray(value, dtype=float))
