# make install | demo | test | lab | bench | results | gallery.
#
# TORCH_BUILD chooses torch's build: empty for your package index's default (on Linux a CUDA build), "cpu" for a build
# without CUDA, or a CUDA version such as "cu130".
TORCH_BUILD ?=
PYTHON ?= python3.11

VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' requirements.lock)
TORCH_INDEX := $(if $(TORCH_BUILD),--index-url https://download.pytorch.org/whl/$(TORCH_BUILD))
RESULTS := data/results
DEMO := $(RESULTS)/demo
TINY := $(RESULTS)/tiny
TINY_PAIRS := tiny_instruct tiny_dpo tiny_math tiny_math_light tiny_code tiny_anneal

# idle threads that sleep instead of spinning: several times faster where cores are shared
export OMP_WAIT_POLICY ?= passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install demo test browser lint lab bench results gallery sweep slow-test verify release clean

install: $(VENV)/.installed

$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH) $(TORCH_INDEX)
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[dev,sweep]'
	touch $@

demo: install
	@mkdir -p $(DEMO)
	$(BIN)/papermill notebooks/01_score.ipynb $(DEMO)/01_score.ipynb -r pair tiny_instruct -p n_tokens 100000
	$(BIN)/papermill notebooks/02_fit.ipynb $(DEMO)/02_fit.ipynb -r pair tiny_instruct -p n_tokens 100000 -r out_dir $(DEMO)
	$(BIN)/papermill notebooks/04_figures.ipynb $(DEMO)/04_figures.ipynb -r out_dir $(DEMO)
	@$(BIN)/python scripts/show_results.py $(DEMO)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the tests that open notebooks in a browser use a Chromium of the system; without one they are skipped, with CI=true they fail
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; \
	else echo "no Chromium, and no root with apt to install it: the browser tests are skipped"; fi || true

test: lint browser
	$(BIN)/python -m pytest

slow-test: install
	$(BIN)/python -m pytest -m slow

lab: install
	$(BIN)/jupyter lab --notebook-dir=.

bench: install
	$(BIN)/python benchmarks/foundation.py

# rebuilds figures/ from the shipped tiny pairs, controls included: about 15 minutes a pair on two free cores. What is
# finished is kept, and a killed run goes on. The known-answer worlds are made once, with the first pair.
results: install
	@mkdir -p $(TINY)
	n_seeds=20; for pair in $(TINY_PAIRS); do \
	  $(BIN)/papermill notebooks/02_fit.ipynb $(TINY)/02_fit_$$pair.ipynb -r pair $$pair -r out_dir $(TINY) || exit 1; \
	  $(BIN)/papermill notebooks/03_controls.ipynb $(TINY)/03_controls_$$pair.ipynb \
	    -r pair $$pair -r out_dir $(TINY) -p n_seeds $$n_seeds || exit 1; \
	  n_seeds=0; \
	done
	$(BIN)/papermill notebooks/04_figures.ipynb $(TINY)/04_figures.ipynb -r out_dir $(TINY)
	$(BIN)/python scripts/publish_results.py $(TINY) figures
	$(MAKE) gallery

# executed copies of the notebooks for readers without a kernel, in docs/gallery: those of one pair with results
GALLERY_PAIR := tiny_instruct
gallery: install
	$(BIN)/papermill notebooks/01_score.ipynb $(TINY)/01_score_$(GALLERY_PAIR).ipynb -r pair $(GALLERY_PAIR) -r out_dir $(TINY)
	$(BIN)/papermill notebooks/04_figures.ipynb $(TINY)/04_figures_$(GALLERY_PAIR).ipynb -r pair $(GALLERY_PAIR) -r out_dir $(TINY)
	$(BIN)/papermill notebooks/05_spurious.ipynb $(TINY)/05_spurious.ipynb -p quick True
	$(BIN)/papermill notebooks/06_checkpoints.ipynb $(TINY)/06_checkpoints.ipynb
	$(BIN)/python scripts/make_gallery.py docs/gallery $(TINY)/0[1-4]_*_$(GALLERY_PAIR).ipynb $(TINY)/0[56]_*.ipynb
	cp $(TINY)/$(GALLERY_PAIR)/report.html docs/gallery/report_$(GALLERY_PAIR).html

# all pairs by one command; PAIRS: tiny, public, names, or a YAML file; DRY=-n shows the plan, docs/sweep.md the rest
PAIRS ?= tiny
DRY ?=
SWEEP ?=
sweep: install
	$(BIN)/python scripts/sweep.py $(PAIRS) $(DRY) $(SWEEP)

# hashes all captures again and names damaged files; REPAIR=--repair deletes those, to be scored anew
REPAIR ?=
verify: install
	$(BIN)/python scripts/verify_captures.py $(REPAIR)

# packs tables, corrections, manifests and checksums of all finished pairs, from which 04_figures runs alone
release: install
	$(BIN)/python scripts/make_release.py

clean:
	rm -rf $(VENV) data/captures $(RESULTS)
