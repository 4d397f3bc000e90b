"""An archive of results to publish: tables, corrections and manifests with checksums; no hidden states, no weights.

    data/results/<pair>/    losses, recovery, loss_profile, tokens, controls where made, summary.json, corrections/
    data/results/<pair>/manifests/    what each capture was made of
    data/pairs.yaml, data/published/, notebooks/04_figures.ipynb, pyproject.toml    so that it is a project root
    CITATION.cff, LICENSE, SHA256SUMS

With this package installed, PSD_ROOT set to the unpacked folder is all that 04_figures needs.
"""

import gzip
import io
import logging
import re
import tarfile
from pathlib import Path

from .correction import Correction
from .errors import PsdError
from .files import read_json, sha256_of_file, write_atomically
from .paths import captures_dir, project_root, results_dir
from .version import __version__

_LOG = logging.getLogger(__name__)

CHECKSUMS = "SHA256SUMS"
_FROM_ROOT = ("CITATION.cff", "LICENSE", "pyproject.toml", "data/pairs.yaml", "notebooks/04_figures.ipynb")
_OF_A_PAIR = (
    *(f"{name}.parquet" for name in ("losses", "recovery", "loss_profile", "tokens")),
    *(f"{name}.parquet" for name in ("controls", "controls_losses", "left_out")),
    *("controls.json", "summary.json"),
)
_ABSOLUTE = re.compile(r'"(/[^"]+|[A-Za-z]:\\[^"]+)"')


def release_files(results: Path | None = None, captures: Path | None = None) -> dict[str, Path]:
    """Return the files of a release: their names in the archive, and where they lie.

    Raises:
        PsdError: no finished study, or a file that should be a correction and is not.
    """
    root = project_root()
    results, captures = results or results_dir(), captures or captures_dir()
    files = {name: root / name for name in _FROM_ROOT if (root / name).is_file()}
    for path in sorted((root / "data" / "published").glob("*")):
        files[f"data/published/{path.name}"] = path
    pairs = [path.parent for path in sorted(results.glob("*/summary.json")) if "fits" in read_json(path)]
    if not pairs:
        raise PsdError(f"no finished study in {results}: run 02_fit first")
    for folder in pairs:
        place = f"data/results/{folder.name}"
        files |= {f"{place}/{name}": folder / name for name in _OF_A_PAIR if (folder / name).is_file()}
        for path in sorted((folder / "corrections").glob("*.safetensors")):
            Correction.load(path)  # nothing else of this format is published
            files[f"{place}/corrections/{path.name}"] = path
        summary = read_json(folder / "summary.json")
        for role, key in summary["settings"]["captures"].items():
            manifest = captures / key / "manifest.json"
            if manifest.is_file():
                files[f"{place}/manifests/{role}.json"] = manifest
            else:
                _LOG.warning("%s: the capture of the %s model is gone, so its manifest is left out", folder.name, role)
    return files


def write_release(target: Path, results: Path | None = None, captures: Path | None = None) -> list[str]:
    """Write the archive (.tar.gz) and return the names of its files. The same results give the same bytes.

    Raises:
        PsdError: as `release_files`, or the archive cannot be written.
    """
    files = release_files(results, captures)
    for name, path in files.items():
        if path.suffix == ".json" and (found := sorted(set(_ABSOLUTE.findall(path.read_text(encoding="utf-8"))))):
            _LOG.warning("%s names places on this machine: %s", name, ", ".join(found[:3]))
    sums = "".join(f"{sha256_of_file(path)}  {name}\n" for name, path in sorted(files.items()))
    top = f"psd_utils-results-{__version__}"

    def write(path: Path) -> None:
        with (
            open(path, "wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name in sorted([*files, CHECKSUMS]):
                data = files[name].read_bytes() if name in files else sums.encode()
                entry = tarfile.TarInfo(f"{top}/{name}")  # no owner, no time
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))

    write_atomically(target, write)
    return [*sorted(files), CHECKSUMS]


def check_release(folder: Path) -> list[str]:
    """Return the files of an unpacked release that are missing or changed.

    Raises:
        PsdError: the folder is not an unpacked release.
    """
    sums = folder / CHECKSUMS
    if not sums.is_file():
        raise PsdError(f"{folder} holds no {CHECKSUMS}: it is not an unpacked release")
    lines = [line.split("  ", 1) for line in sums.read_text(encoding="utf-8").splitlines()]
    return [name for digest, name in lines if not _is(folder / name, digest)]


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_of_file(path) == digest
