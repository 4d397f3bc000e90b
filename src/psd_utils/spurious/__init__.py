"""Spurious forgetting: collapse, recovery and erosion of old facts while new ones are learned.

Part I, the associative memory: memory (facts and model), training, trajectory and measure (what is logged),
arms (the ingredients one by one), equations, interventions, laws, acceptance and findings (claimed against
found). shift splits any change into its common and individual parts, from plain tensors.

Part II, the transformer: biographies (people, their facts and how they are told: biography_language, biography_text,
biography_batches), transformer (the model) and transformer_ training, measure, surgery, runs, findings and plots.

A user's own runs: prompts, recall, decomposition, surgery and verdict (what is asked of a model, and said of it),
checkpoints (the study of a run, with checkpoint_ files, report and plots), alarm and callback (in training), example.
"""

from psd_utils.spurious.arms import ARMS, ArmResult, run_arms
from psd_utils.spurious.biographies import Biographies, BiographySettings, make_biographies
from psd_utils.spurious.memory import MemorySettings, World, make_world
from psd_utils.spurious.shift import (
    Split,
    common_only,
    individual_only,
    remove_direction,
    remove_random_part,
    remove_top_directions,
    shared_part,
    split_change,
    subtract_offset,
    top_directions,
)
from psd_utils.spurious.training import Protocol, fine_tune, match_rate, pretrain
from psd_utils.spurious.trajectory import Trajectory
from psd_utils.spurious.transformer_runs import CONDITIONS, Study, make_study, run_conditions

__all__ = [
    "ARMS",
    "CONDITIONS",
    "ArmResult",
    "Biographies",
    "BiographySettings",
    "MemorySettings",
    "Protocol",
    "Split",
    "Study",
    "Trajectory",
    "World",
    "common_only",
    "fine_tune",
    "individual_only",
    "make_biographies",
    "make_study",
    "make_world",
    "match_rate",
    "pretrain",
    "remove_direction",
    "remove_random_part",
    "remove_top_directions",
    "run_arms",
    "run_conditions",
    "shared_part",
    "split_change",
    "subtract_offset",
    "top_directions",
]
