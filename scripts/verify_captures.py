"""Hash all captures again and name damaged files: `python scripts/verify_captures.py [--repair] [FOLDER]`.

With --repair, damaged files are deleted and the next run of 01_score or 02_fit scores them, and only them, anew.
"""

import argparse
import sys
from pathlib import Path

from psd_utils.paths import captures_dir
from psd_utils.storage import verify_captures


def main(arguments: list[str]) -> int:
    """Print a line a capture and one a damaged file; return 1 if any is damaged and was not repaired."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="default: data/captures")
    parser.add_argument("--repair", action="store_true", help="delete damaged files, to be scored anew")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder or captures_dir()
    captures = verify_captures(folder, chosen.repair)
    for capture in captures:
        state = "damaged" if capture.damaged else "sound"
        print(f"{capture.folder.name}  {capture.bytes / 2**20:9.1f} MiB  {state:7}  {capture.label}")
        for name in capture.damaged:
            print(f"  {'deleted' if chosen.repair else 'damaged'}: {capture.folder / name}")
    damaged = sum(len(capture.damaged) for capture in captures)
    print(f"{len(captures)} captures in {folder}, {damaged} damaged files")
    if damaged and not chosen.repair:
        print("run again with --repair (make verify REPAIR=--repair) to have them, and only them, scored anew")
    return 1 if damaged and not chosen.repair else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
