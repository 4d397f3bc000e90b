"""Records the small transformer's runs: one tidy table of many seeds and conditions, for figures and for warning rules.

    .venv/bin/python scripts/record_spurious_runs.py --seeds 8 --out data/spurious/transformer_runs.csv

About 4 minutes of one core a seed. Finished runs and checkpoints are kept in --work, so a killed run goes on.
"""

import argparse
from pathlib import Path

import pandas as pd

from psd_utils.spurious.transformer_runs import CONDITIONS, Study, run_conditions

LONG = ("B_prime", "C", "no_final_norm")
SHORT = ("X", "rehearsal", "tiny_rate")


def main() -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("data/spurious/transformer_runs.csv"))
    parser.add_argument("--work", type=Path, default=Path("data/results/spurious_transformer"))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    tables = []
    for seed in range(arguments.seeds):
        for names, n_steps in ((LONG, 1200), (SHORT, 600)):
            chosen = {name: CONDITIONS[name] for name in names}
            study = Study(n_steps=n_steps)
            tables.append(run_conditions(chosen, [seed], study, arguments.work, arguments.device, progress=True))
        pd.concat(tables).to_csv(arguments.out, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
