"""Every picture of a study and of many, gathered from the modules that draw them; 03_controls has `control_figures`."""

from .drawing import correction_label, save_figure
from .overview_figures import (
    by_gap,
    forest_figure,
    gap_share_figure,
    gap_share_table,
    ladders_figure,
    published_figure,
    temperature_figure,
)
from .profile_figures import bias_spectrum_figure, bias_table, profile_figure, profile_table
from .study_figures import bias_figure, document_loss_figure, gap_figure, largest_biases, share_figure

__all__ = [
    "bias_figure",
    "bias_spectrum_figure",
    "bias_table",
    "by_gap",
    "correction_label",
    "document_loss_figure",
    "forest_figure",
    "gap_figure",
    "gap_share_figure",
    "gap_share_table",
    "ladders_figure",
    "largest_biases",
    "profile_figure",
    "profile_table",
    "published_figure",
    "save_figure",
    "share_figure",
    "temperature_figure",
]
