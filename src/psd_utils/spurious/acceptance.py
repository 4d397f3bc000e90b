"""The acceptance table: what is claimed, what this run found, and whether the two agree.

In: the rows of data/spurious/acceptance.yaml and the findings of a run (name -> values over seeds or runs).
Out: one table. Notebook and tests read the same rows, so there is one tolerance for each claim.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

Findings = Mapping[str, np.ndarray]
"""Name of a quantity -> its values over seeds (or runs); the mean is judged."""

HOLDS, FAILS, NOT_RUN = "holds", "does not hold", "not run"


@dataclass(frozen=True)
class Check:
    """One number of a row.

    Attributes:
        quantity: its name among the findings.
        expected: the value in the specification; None where it gives only a bound.
        low: smallest value that agrees; None for no lower bound.
        high: largest value that agrees; None for no upper bound. Without bounds the number is only reported.
    """

    quantity: str
    expected: float | None = None
    low: float | None = None
    high: float | None = None

    def accepts(self, value: float) -> bool:
        """Whether a value lies within the bounds; NaN never does where there is a bound."""
        above = self.low is None or value >= self.low
        below = self.high is None or value <= self.high
        return above and below

    @property
    def tolerance(self) -> str:
        """The bounds in words."""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} … {self.high:g}"
        if self.low is not None:
            return f"≥ {self.low:g}"
        return "reported only" if self.high is None else f"≤ {self.high:g}"


@dataclass(frozen=True)
class Row:
    """One claim: number in the specification, claim, configuration, expectation in words, source, its checks.

    The source is M (measured with an independent implementation) or P (published by the authors).
    """

    id: int | str
    claim: str
    configuration: str
    expected: str
    source: str
    checks: tuple[Check, ...]


def data_folder() -> Path:
    """The repository's data/spurious folder, from anywhere inside the repository.

    $PSD_ROOT if set, else the nearest parent of the working folder that holds
    data/spurious/acceptance.yaml, else the source tree of an editable install.

    Raises:
        FileNotFoundError: none of them holds it.
    """
    given = os.environ.get("PSD_ROOT")
    here = Path.cwd()
    roots = [Path(given)] if given else [here, *here.parents, *Path(__file__).resolve().parents]
    for root in roots:
        if (root / "data" / "spurious" / "acceptance.yaml").is_file():
            return root / "data" / "spurious"
    raise FileNotFoundError(
        f"No data/spurious/acceptance.yaml in {given or 'any parent of ' + str(here)}. "
        "Work inside the repository, or set PSD_ROOT to its root."
    )


def load_rows(path: Path | None = None) -> tuple[Row, ...]:
    """Read the acceptance rows; None reads the repository's own.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a row with a key that is missing or unknown.
    """
    path = path or data_folder() / "acceptance.yaml"
    rows = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["rows"]:
        try:
            checks = tuple(Check(**check) for check in entry["checks"])
            rows.append(Row(**{**entry, "checks": checks}))
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"Row {entry.get('id', '?')} of {path.name}: {error}. Expected id, claim, configuration, "
                "expected, source, checks (quantity, expected, low, high)."
            ) from error
    return tuple(rows)


def judge(rows: Sequence[Row], findings: Findings) -> pd.DataFrame:
    """The acceptance table of a run.

    Returns:
        row, claim, configuration, expected, tolerance, found, verdict ("holds", "does not hold", or "not
        run" where a bounded number of the row is missing), source. Every found number is a mean; ± is the
        standard deviation over n seeds or runs.
    """
    lines = []
    for row in rows:
        bounded = [c for c in row.checks if c.low is not None or c.high is not None]
        missing = [c for c in bounded if c.quantity not in findings]
        verdict = NOT_RUN
        if not missing:
            right = all(c.accepts(float(np.mean(findings[c.quantity]))) for c in bounded)
            verdict = HOLDS if right else FAILS
        lines.append(
            {
                "row": row.id,
                "claim": row.claim,
                "configuration": row.configuration,
                "expected": row.expected,
                "tolerance": "; ".join(f"{c.quantity} {c.tolerance}" for c in bounded),
                "found": "; ".join(
                    f"{c.quantity} {describe(findings[c.quantity])}" for c in row.checks if c.quantity in findings
                ),
                "verdict": verdict,
                "source": row.source,
            }
        )
    return pd.DataFrame(lines)


def describe(values: np.ndarray) -> str:
    """Mean, and ± standard deviation (n) where there are several values, in three digits."""
    values = np.atleast_1d(np.asarray(values, dtype=float))
    mean = float(values.mean())
    if len(values) == 1:
        return f"{mean:.3g}"
    return f"{mean:.3g} ± {float(values.std(ddof=1)):.2g} (n={len(values)})"


def save_run(folder: Path, tables: Mapping[str, pd.DataFrame], settings: Mapping[str, Any]) -> None:
    """Write each table as NAME.csv and the settings as settings.json; a run already there is overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    plain = {k: (None if isinstance(v, float) and math.isnan(v) else v) for k, v in settings.items()}
    text = json.dumps(plain, indent=1, ensure_ascii=False, sort_keys=True)
    (folder / "settings.json").write_text(text + "\n", encoding="utf-8")
