"""Copy what `make results` found to the repository: `python scripts/publish_results.py RESULTS figures`.

Writes tables of all finished pairs as CSV, and as SVG the pictures of all pairs together and some of each pair's own.
"""

import shutil
import sys
from pathlib import Path

import pandas as pd

from psd_utils import figures, report
from psd_utils.errors import PsdError
from psd_utils.files import read_table
from psd_utils.pair_controls import read_controls

LARGEST = 300_000
"""Bytes: what is committed stays small."""
OVERVIEW = ("forest", "gap_share", "temperatures", "ladders", "published")
OF_A_PAIR = ("shares", "profile", "biases", "damage")


def main(results: str, target: str) -> None:
    """Copy tables and figures of every finished pair in `results` to `target`, and say what was copied."""
    studies = report.finished_studies(results)
    folder = Path(target)
    folder.mkdir(exist_ok=True)
    recovery = pd.concat([study.recovery for study in studies], ignore_index=True)
    tables = {"recovery": recovery}
    controls = [done.table for study in studies if (done := read_controls(study.path)) is not None]
    if controls:
        tables["controls"] = pd.concat(controls, ignore_index=True)
        ladder = tables["controls"]["analysis"] == "ladder"
        tables["ladders"] = report.ladders_table(tables["controls"][ladder]).reset_index()
    profiles = [
        figures.profile_table(read_table(study.path / "loss_profile.parquet")).assign(pair=study.pair.name)
        for study in studies
    ]
    tables["profiles"] = pd.concat(profiles, ignore_index=True)
    verdicts = report.verdict_table(recovery, tables.get("controls"))
    tables["verdicts"] = verdicts.reset_index()
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    pairs = [study.pair.name for study in studies]
    wanted = [*OVERVIEW, *(f"{what}_{pair}" for what in OF_A_PAIR for pair in pairs)]
    made = [path for name in wanted if (path := report.figures_folder(results) / f"{name}.svg").is_file()]
    for path in made:
        shutil.copyfile(path, folder / path.name)
    large = [path.name for path in folder.iterdir() if path.is_file() and path.stat().st_size > LARGEST]
    if large:
        raise PsdError(f"too large to commit, over {LARGEST:,} bytes: {', '.join(sorted(large))}")
    print(
        f"{folder}: {len(tables)} tables and {len(made)} pictures of {len(pairs)} pairs, {len(controls)} with controls"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
