"""Copy what `make results` found to the repository: `python scripts/publish_results.py RESULTS figures`.

Writes the recovery tables of all finished pairs as one CSV, and the figures as SVG.
"""

import shutil
import sys
from pathlib import Path

import pandas as pd

from psd_utils import report


def main(results: str, target: str) -> None:
    """Copy tables and figures of every finished pair in `results` to `target`."""
    studies = report.finished_studies(results)
    folder = Path(target)
    folder.mkdir(exist_ok=True)
    recovery = pd.concat([study.recovery for study in studies], ignore_index=True)
    recovery.to_csv(folder / "recovery.csv", index=False, float_format="%.6g")
    for figure in sorted(report.figures_folder(results).glob("*.svg")):
        shutil.copyfile(figure, folder / figure.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
