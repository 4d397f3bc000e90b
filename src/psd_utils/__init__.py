"""What a language model loses when it is trained further: the prior-shift diagnostic, with its controls."""

from typing import TYPE_CHECKING, Any

from .correction import Correction
from .errors import PsdError
from .fit import Fit, fit_correction
from .head import OutputModel
from .kernels import HeadStatistics, Readout, corrected_nll, head_statistics
from .pairs import Member, Pair, load_pair
from .recovery import recovery_table
from .study import Study, load_study, run_study
from .version import __version__

if TYPE_CHECKING:
    from .widgets import explore

__all__ = [
    "Correction",
    "Fit",
    "HeadStatistics",
    "Member",
    "OutputModel",
    "Pair",
    "PsdError",
    "Readout",
    "Study",
    "__version__",
    "corrected_nll",
    "explore",
    "fit_correction",
    "head_statistics",
    "load_pair",
    "load_study",
    "recovery_table",
    "run_study",
]


def __getattr__(name: str) -> Any:
    """Return `explore`, whose widgets take half a second to import, when it is first asked for."""
    if name == "explore":
        from .widgets import explore

        return explore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
