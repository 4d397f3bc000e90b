"""The columns of recovery.parquet that come from the fits, not from losses."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from .correction import FITTED_BIAS_KINDS
from .version import __version__

NOT_DAMAGED = "bias_all has no damage share here, only in 03_controls (setting top_k=all)"
NO_DAMAGE = "no damaged models (none were asked for, or there is no gap on fit): no damage share"

FIT_COLUMNS = (
    "temperature_base",
    "temperature_derived",
    "temperature_damage",
    "penalty_base",
    "penalty_derived",
    "selected_none_base",
    "selected_none_derived",
    "resamples_without_gap",
    "converged",
    "reason",
    "code_version",
)


def add_fits(shares: pd.DataFrame, records: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> pd.DataFrame:
    """Return the recovery table: shares joined with what the fits' records say, columns in the order of DESIGN §5.

    `records` are by model (base, derived, damaged-0, …) and kind. `top_k` becomes the size of the set.
    """
    rows = []
    for row in shares.to_dict("records"):
        kind = str(row["correction"])
        own = {label: kinds[kind] for label, kinds in records.items() if kind in kinds}
        row["top_k"] = records["base"]["bias_all" if kind == "bias_all" else "bias"]["set_size"]
        for role in ("base", "derived"):
            row[f"temperature_{role}"] = _temperature(own[role])
            row[f"penalty_{role}"] = own[role]["penalty"] if kind in FITTED_BIAS_KINDS else None
            row[f"selected_none_{role}"] = own[role]["selected_none"]
        temperatures = [_temperature(record) for label, record in own.items() if label.startswith("damaged")]
        row["temperature_damage"] = float(np.mean(temperatures)) if temperatures else None
        unchanged = [label for label, record in own.items() if record["selected_none"]]
        row["converged"] = not any(r["status"] in ("not_converged", "node_edge") for r in own.values())
        remarks = [row["reason"]] if row["reason"] else []
        remarks += [f"{label}: at_bound" for label, record in own.items() if record["status"] == "at_bound"]
        if unchanged:
            remarks.append(f"no correction is better on select for: {', '.join(unchanged)}")
        if not temperatures and pd.notna(row["symmetric_share"]):
            remarks.append(NOT_DAMAGED if any(label.startswith("damaged") for label in records) else NO_DAMAGE)
        row["reason"] = "; ".join(remarks) or None
        row["code_version"] = __version__
        rows.append(row)
    columns = [c for c in shares.columns if c not in ("resamples_without_gap", "reason")]
    columns.insert(columns.index("correction") + 1, "top_k")
    return pd.DataFrame(rows)[[*columns, *FIT_COLUMNS]]


def _temperature(record: Mapping[str, Any]) -> float:
    return 1.0 if record["selected_none"] else float(record["fitted_temperature"])
