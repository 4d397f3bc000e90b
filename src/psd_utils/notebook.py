"""What every notebook needs: parameters that are checked, and a pair made of them.

papermill injects a cell that begins with `# Parameters`; it only warns about unknown names, and turns `-p` values into
numbers where it can, so both are checked here.
"""

import ast
import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

import pandas as pd
from IPython import get_ipython
from IPython.core.pylabtools import select_figure_formats

from .errors import PsdError, nearest
from .pairs import Member, Pair, load_pair

_LOG = logging.getLogger(__name__)
OPTIONAL_NUMBERS = ("n_tokens", "top_k")


def check_parameters(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook's parameters by name, checked against their defaults.

    An empty string means not given: the default, and None where that is empty too. `names` is the notebook's
    `globals()`. The defaults are the notebook's cell that begins with `# Defaults`; that cell and the one papermill
    injected are read from IPython's input history, so running all cells again works.

    Raises:
        PsdError: a parameter that the notebook does not have (with the nearest name), or of the wrong kind.
    """
    history = list(names.get("In", []))
    at = _last_cell(history, "# Defaults")
    if at is None:
        raise PsdError("run the cell that begins with `# Defaults` first")
    defaults = {name: _literal(name, value) for name, value in _assignments(history[at])}
    injected = _last_cell(history[at + 1 :], "# Parameters")
    if injected is not None:
        for name, _ in _assignments(history[at + 1 + injected]):
            if name not in defaults:
                raise PsdError(f"unknown parameter {name!r}; {nearest(name, list(defaults))}")
    return {name: _checked(name, names.get(name, default), default) for name, default in defaults.items()}


def _last_cell(history: list[str], beginning: str) -> int | None:
    """Return the index of the last cell that begins so, or None."""
    return max((i for i, cell in enumerate(history) if cell.lstrip().startswith(beginning)), default=None)


def _assignments(cell: str) -> list[tuple[str, ast.expr]]:
    """Return (name, value) of the plain assignments of a cell."""
    statements = [s for s in ast.parse(cell).body if isinstance(s, ast.Assign)]
    return [(t.id, s.value) for s in statements for t in s.targets if isinstance(t, ast.Name)]


def _literal(name: str, value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError as error:
        raise PsdError(f"parameter {name} must be a plain value, found {ast.unparse(value)}") from error


def _checked(name: str, value: Any, default: Any) -> Any:
    if value is None or value == "":
        value = default
    if value is None or value == "":
        return None
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise PsdError(f"parameter {name} must be True or False, found {value!r}: for papermill, -p {name} True")
        return value
    if name in OPTIONAL_NUMBERS or isinstance(default, int):
        if isinstance(value, bool) or not isinstance(value, int):
            raise PsdError(f"parameter {name} must be a whole number, found {value!r}: for papermill, -p {name} 1000")
        return value
    if isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PsdError(f"parameter {name} must be a number, found {value!r}")
        return float(value)
    if not isinstance(value, str):
        raise PsdError(
            f"parameter {name} must be text, found {value!r} ({type(value).__name__}): papermill's -p turns text that "
            f"looks like a number into one and loses the text; give it with -r {name} instead"
        )
    return value


def chosen_pair(parameters: Mapping[str, Any]) -> Pair:
    """Return the pair a notebook was asked for: a registered name, or the user's own `base` and `derived`.

    Raises:
        PsdError: no pair, or only one of base and derived; a revision or adapter without base and derived.
    """
    base, derived = parameters["base"], parameters["derived"]
    if not base and not derived:
        if not parameters["pair"]:
            raise PsdError("give a pair by name, or base and derived by path or hub name")
        for name in ("base_revision", "derived_revision", "base_adapter", "derived_adapter"):
            if parameters[name]:
                raise PsdError(f"{name} goes with base and derived; the pair {parameters['pair']} has its own")
        return load_pair(parameters["pair"])
    if not (base and derived):
        lacking = "derived" if base else "base"
        raise PsdError(f"a pair of your own needs both base and derived; {lacking} is missing")
    return Pair(
        base=Member(base, parameters["base_revision"], parameters["base_adapter"]),
        derived=Member(derived, parameters["derived_revision"], parameters["derived_adapter"]),
    )


def chosen_members(members: str) -> tuple[str, ...]:
    """Return the roles that `members` (both, base or derived) stands for.

    Raises:
        PsdError: another word.
    """
    roles = {"both": ("base", "derived"), "base": ("base",), "derived": ("derived",)}
    if members not in roles:
        raise PsdError(f"members must be both, base or derived, found {members!r}; {nearest(members, list(roles))}")
    return roles[members]


def require_both(members: str) -> None:
    """Check that a notebook that compares both members was not asked for one.

    Raises:
        PsdError: `members` is not "both".
    """
    if chosen_members(members) != ("base", "derived"):
        raise PsdError(f"this notebook compares both members, found members {members!r}; 01_score can score one alone")


def study_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `run_study` among a notebook's parameters, those not given left out."""
    names = ("text", "n_tokens", "top_k", "device", "dtype", "seed", "n_damage_seeds", "n_resamples", "out_dir")
    return {name: parameters[name] for name in names if parameters.get(name) is not None}


def start(level: int = logging.INFO) -> None:
    """Make the package's log and its figures visible in the notebook's output; harmless when called again."""
    logger = logging.getLogger("psd_utils")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    shell = get_ipython()
    if shell is not None:
        # figures are made without pyplot, so nothing else tells IPython how to show one
        select_figure_formats(shell, {"png"}, dpi=110)
        # reasons are sentences, and a table must not cut them
        pd.set_option("display.max_colwidth", None)
