"""From slider to picture: how long a move of the explorer takes, in Python and in a browser.

Run `python benchmarks/explorer.py` on a finished study of tiny_instruct (after `make demo`: `--out-dir
data/results/demo`). In Python, a move ends when the last trait is set. In the browser, JupyterLab runs in headless
Chromium; a move begins with the key press that the page sees and ends with the frame after the numbers and the picture
have changed.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from common import HERE, setting, write

import psd_utils as psd

sys.path.insert(0, str(HERE.parent / "tests"))
from browser import OpenNotebook, browser_page, jupyter_lab

# One promise a key press: resolved with milliseconds once the read-outs and the point of the loss plot have changed.
WATCH = """() => {
    const loss = document.querySelector('.psd-readouts'), plot = document.querySelector('.psd-loss-plot');
    window.moved = new Promise((resolve, reject) => {
        setTimeout(() => reject(new Error('nothing moved within 10 s')), 10000);
        let start = null, changed = new Set();
        document.addEventListener('keydown', () => { start = performance.now(); }, {capture: true, once: true});
        const observers = [[loss, 'numbers'], [plot, 'picture']].map(([element, name]) => {
            const observer = new MutationObserver(() => {
                if (start === null) return;
                changed.add(name);
                if (changed.size === 2) {
                    observers.forEach(o => o.disconnect());
                    requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - start), 0));
                }
            });
            observer.observe(element, {subtree: true, childList: true, characterData: true, attributes: true});
            return observer;
        });
    });
}"""


def in_python(study: psd.Study, moves: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return milliseconds of moves of each slider, by a clock in seconds."""
    explorer = psd.explore(study)
    times: dict[str, list[float]] = {}
    for name, low, high in (("temperature", 0.5, 2.0), ("strength", 0.0, 0.99)):
        times[name] = []
        for value in np.linspace(low, high, moves).tolist():
            start = clock()
            getattr(explorer, name).value = value
            times[name].append(1000 * (clock() - start))
    return times


def in_browser(pair: str, out_dir: Path, moves: int) -> dict[str, list[float]]:
    """Return milliseconds from key press to changed page, of each slider."""
    source = f"import psd_utils as psd\n\npsd.explore(psd.load_study(psd.load_pair({pair!r}), {str(out_dir)!r}))"
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "explorer.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
        with jupyter_lab(Path(folder), {}) as lab, browser_page() as (page, seen):
            notebook = OpenNotebook(page, lab, path.name)
            notebook.run_all()
            page.wait_for_selector(".psd-loss-plot svg path")
            for name, key in (("temperature", "ArrowRight"), ("strength", "ArrowLeft")):
                handle = page.locator(f".psd-{name} [role=slider]")
                times[name] = []
                for _ in range(moves):
                    notebook.settle()
                    page.evaluate(WATCH)
                    handle.press(key)
                    times[name].append(float(page.evaluate("window.moved")))
            if seen.errors:
                raise RuntimeError(f"the browser complained: {seen.errors}")
    return times


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return median and 95th percentile of each slider."""
    return {
        name: {"p50_ms": round(statistics.median(own), 1), "p95_ms": round(float(np.percentile(own, 95)), 1)}
        for name, own in times.items()
    }


def main() -> None:
    """Measure both ways and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="tiny_instruct")
    parser.add_argument("--out-dir", type=Path, default=None)
    parser.add_argument("--moves", type=int, default=40)
    arguments = parser.parse_args()
    study = psd.load_study(psd.load_pair(arguments.pair), arguments.out_dir)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    found = psd.explore(study).exploration
    results: dict[str, Any] = {
        "setting": setting(),
        "tokens": len(found.subsample.targets),
        "ids": study.summary["fits"]["base"]["bias"]["set_size"],
        "moves": arguments.moves,
        "load_per_core_at_the_start": round(load, 1),
        "python": summary(in_python(study, arguments.moves, time.perf_counter)),
        "python_processor_time": summary(in_python(study, arguments.moves, time.process_time)),
        "browser": summary(in_browser(arguments.pair, study.path.parent, arguments.moves)),
    }
    for where in ("python", "python_processor_time", "browser"):
        print(where, results[where])
    write("explorer", results)


if __name__ == "__main__":
    main()
