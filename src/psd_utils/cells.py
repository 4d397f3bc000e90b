"""How numbers stand in the tables that people read: rounded, with what belongs to them, a dash where undefined."""

from collections.abc import Iterable

import pandas as pd


def number(value: float, digits: int) -> str:
    """Return a rounded number."""
    return "–" if pd.isna(value) else f"{value:.{digits}f}"


def with_interval(rows: pd.DataFrame, value: str, low: str, high: str, digits: int) -> list[str]:
    """Return a column's numbers, each with its interval in brackets where it has one."""
    return [
        number(v, digits)
        + (f" [{a:.{digits}f}, {b:.{digits}f}]" if pd.notna(a) and pd.notna(b) and pd.notna(v) else "")
        for v, a, b in zip(rows[value], rows[low], rows[high], strict=True)
    ]


def with_spread(values: Iterable[float], spreads: Iterable[float], digits: int) -> list[str]:
    """Return numbers, each ± its standard deviation where it has one."""
    return [
        number(value, digits) + (f" ± {sd:.{digits}f}" if pd.notna(sd) else "")
        for value, sd in zip(values, spreads, strict=True)
    ]
