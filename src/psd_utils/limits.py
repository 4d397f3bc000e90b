"""What the numbers of this repository do not show: one text, for the README, the notebooks and every report."""

LIMITS = (
    "**One shard, three families, small models.** The published study scored one shard of web text with models of "
    "three families, of 7B parameters and below. Other texts, families and sizes may behave otherwise.",
    "**Many comparisons, none planned.** Its fourteen pairs, and the pairs here, are exploratory: among many intervals "
    "of 95 % some miss by chance, and no correction for multiple comparisons is made.",
    "**Text that was probably trained on.** The published scoring text is probably part of OLMo-2's training data, so "
    "the base's loss there may be lower than on new text.",
    "**A temperature is not a cause.** A fitted T does not separate a pure change of temperature from other changes of "
    "the logits; random noise on a head alone is best answered by a T above 1.",
    "**Tiny models are no evidence about real ones.** The shipped pairs, of a million parameters, prove the pipeline.",
    "**A share means nothing without its control.** A model that was damaged at random, with nothing to restore, gets "
    "a part of its loss back, too, so every share must be read beside its damage control. And a small share does not "
    "mean that nothing was lost, only that what was lost is not a fixed bias or temperature.",
)
"""Sentences in Markdown."""


def limits_markdown() -> str:
    """Return the limits as a Markdown list."""
    return "\n".join(f"- {text}" for text in LIMITS)
