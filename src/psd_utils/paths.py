"""Where things lie: the project root and the default folders that hang on it."""

import os
from pathlib import Path

from .errors import PsdError

_MARKERS = ("pyproject.toml", "data/pairs.yaml")


def project_root() -> Path:
    """Return the project root.

    `$PSD_ROOT` if set, else the nearest parent of the working folder that holds pyproject.toml and
    data/pairs.yaml, else the source tree of an editable install.

    Raises:
        PsdError: no root was found, or `$PSD_ROOT` is not one.
    """
    explicit = os.environ.get("PSD_ROOT")
    if explicit:
        root = Path(explicit).expanduser()
        if not _is_root(root):
            raise PsdError(f"PSD_ROOT is {explicit!r}, which does not hold {' and '.join(_MARKERS)}")
        return root.resolve()
    here = Path.cwd()
    source_tree = Path(__file__).resolve().parents[2]
    for candidate in (here, *here.parents, source_tree):
        if _is_root(candidate):
            return candidate.resolve()
    raise PsdError(
        f"no project root above {here}: run inside the repository, or set PSD_ROOT to the folder that holds "
        + " and ".join(_MARKERS)
    )


def _is_root(folder: Path) -> bool:
    return all((folder / marker).is_file() for marker in _MARKERS)


def registry_file() -> Path:
    """Return the path of data/pairs.yaml."""
    return project_root() / "data" / "pairs.yaml"


def captures_dir() -> Path:
    """Return the default folder of captures, data/captures."""
    return project_root() / "data" / "captures"


def results_dir() -> Path:
    """Return the default folder of results, data/results."""
    return project_root() / "data" / "results"
