"""Choose the callback's warning rule on some seeds, and write how often it is wrong on the others.

.venv/bin/python scripts/callback_error_rates.py data/spurious/callback_runs.csv data/spurious/callback_error_rates.csv
"""

import sys
from pathlib import Path

import pandas as pd

from psd_utils.spurious.alarm_errors import CALIBRATION_SEEDS, GRID, SIZES_ALONE, choose_rule, error_rates


def main(runs_path: Path, out: Path) -> None:
    """Write the table: rule, its thresholds, on which seeds, and the columns of error_rates."""
    runs = pd.read_csv(runs_path)
    known = runs["seed"].isin(CALIBRATION_SEEDS)
    tables = []
    for name, grid in (("rule", GRID), ("sizes alone", SIZES_ALONE)):
        rule, _ = choose_rule(runs[runs["condition"].isin(["B_prime", "C"])], grid=grid)
        for which, part in (("choosing", runs[known]), ("held out", runs[~known])):
            tables.append(error_rates(part, rule).assign(rule=name, seeds_used=which, **vars(rule)))
        print(name, rule)
    table = pd.concat(tables, ignore_index=True)
    first = ["rule", "least_loss", "hidden_share", "least_ratio", "seeds_used"]
    table[[*first, *(c for c in table.columns if c not in first)]].round(4).to_csv(out, index=False)
    print(table.to_string())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
