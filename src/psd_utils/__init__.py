"""What a language model loses when it is trained further: the prior-shift diagnostic, with its controls."""

from .correction import Correction
from .errors import PsdError
from .fit import Fit, fit_correction
from .head import OutputModel
from .kernels import HeadStatistics, Readout, corrected_nll, head_statistics
from .pairs import Member, Pair, load_pair
from .recovery import recovery_table
from .study import Study, load_study, run_study
from .version import __version__

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
    "fit_correction",
    "head_statistics",
    "load_pair",
    "load_study",
    "recovery_table",
    "run_study",
]
