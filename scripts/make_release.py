"""Pack the results for publication: `python scripts/make_release.py [RESULTS [ARCHIVE]]`.

Defaults: data/results and build/psd_utils-results-<version>.tar.gz.
"""

import logging
import sys
from pathlib import Path

from psd_utils.errors import PsdError
from psd_utils.paths import project_root, results_dir
from psd_utils.release import write_release
from psd_utils.version import __version__


def main(results: str = "", archive: str = "") -> None:
    """Write the archive and say what is in it."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    target = Path(archive) if archive else project_root() / "build" / f"psd_utils-results-{__version__}.tar.gz"
    names = write_release(target, Path(results) if results else results_dir())
    pairs = sorted({name.split("/")[2] for name in names if name.startswith("data/results/")})
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB, {len(names)} files, pairs: {', '.join(pairs)}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PsdError as error:
        raise SystemExit(f"error: {error}") from error
