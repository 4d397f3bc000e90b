"""The worked example at a size for tests: seconds to make, and it collapses all the same."""

from psd_utils.spurious.example import ExampleSettings

SMALL_EXAMPLE = ExampleSettings(
    n_old=24,
    n_new=48,
    n_names=40,
    n_values=8,
    width=64,
    heads=2,
    inner=64,
    batch=32,
    pretraining=250,
    rate=2e-3,
    save_at=(10, 20, 40, 100),
    adapter_at=(20,),
)
