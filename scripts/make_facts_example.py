"""Make the example of notebooks/06_checkpoints: a small Llama, a fine-tuning run that collapses, adapters, facts.

.venv/bin/python scripts/make_facts_example.py data/results/facts_example      # about a minute of one core
.venv/bin/python scripts/make_facts_example.py other --seed 3 --no-adapters
"""

import argparse
from dataclasses import replace
from pathlib import Path

from psd_utils.spurious.example import ExampleSettings, make_example


def main() -> None:
    """Make it, or find it there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-adapters", action="store_true")
    given = parser.parse_args()
    settings = replace(ExampleSettings(), seed=given.seed, **({"adapter_at": ()} if given.no_adapters else {}))
    example = make_example(given.folder, settings)
    print(f"base {example.base}\ncheckpoints {example.checkpoints}\nold {example.old}\nnew {example.new}")


if __name__ == "__main__":
    main()
