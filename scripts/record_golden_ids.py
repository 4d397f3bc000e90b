"""Record golden token ids of registered tokenizer families: `python scripts/record_golden_ids.py [--again] FAMILY...`.

Writes data/golden/<family>.json from the base of the family's first pair, at its pinned revision; only the tokenizer is
fetched. From then on, a run whose tokenizer gives other ids stops. Look at the file before you commit it: the last id
of "a" must not be an end-of-text token, and digits must be split as the family's authors say.
"""

import argparse
import sys

from psd_utils.corpus import golden_file, golden_ids
from psd_utils.errors import PsdError, nearest
from psd_utils.files import write_json
from psd_utils.pairs import load_registry
from psd_utils.paths import project_root, registry_file
from psd_utils.sources import load_tokenizer, locate


def main(arguments: list[str]) -> None:
    """Record the families that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+", metavar="FAMILY")
    parser.add_argument("--again", action="store_true", help="replace what is recorded")
    chosen = parser.parse_args(arguments)
    bases = {}
    for pair in load_registry(registry_file()).values():
        bases.setdefault(pair.family, pair.base)
    for family in chosen.families:
        if family not in bases:
            raise PsdError(f"no registered family {family!r}; {nearest(family, list(bases))}")
        path = golden_file(family)
        if path.exists() and not chosen.again:
            raise PsdError(f"{path} is there; give --again to replace it")
        tokenizer = load_tokenizer(locate(bases[family], weights=False))
        if tokenizer is None:
            raise PsdError(f"{bases[family].label} has no tokenizer")
        base = bases[family]
        record = {"family": family, "model": base.model, "revision": base.revision, "strings": golden_ids(tokenizer)}
        write_json(path, record)
        print(f"{family}: {len(record['strings'])} strings in {path.relative_to(project_root())}")


if __name__ == "__main__":
    main(sys.argv[1:])
