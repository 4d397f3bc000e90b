"""The worked example at a size for tests: seconds to make, and it collapses all the same. Made once a session."""

from pathlib import Path

from psd_utils.spurious.example import Example, ExampleSettings, make_example

SMALL_EXAMPLE = ExampleSettings(
    n_old=24,
    n_new=48,
    n_names=40,
    n_values=8,
    width=64,
    heads=2,
    inner=64,
    batch=32,
    pretraining=220,
    rate=2e-3,
    save_at=(10, 20, 40, 80),
    adapter_at=(20,),
)


def small_example(session: Path) -> Example:
    """The example in a folder of the test session."""
    return make_example(session / "spurious_example", SMALL_EXAMPLE)
