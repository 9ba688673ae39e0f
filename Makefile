# Works with GNU make 3.81, which is what macOS ships.

.DEFAULT_GOAL := help
# `docs` and `examples` are folders too.
.PHONY: help serve install formula docs examples test test-slow test-metal test-clients test-page test-real test-zoo test-mutants check format lock clean train-recall eval-recall train-shapes eval-shapes bench-serve bench-batch bench-router bench-memory bench-cluster \
	bench-group bench-vision bench-templates bench-recipe bench-quality bench-papers bench-checkpoints soak attack

PYTHON ?= python3
CONFIG ?= configs/one-mac.yaml
PORT ?=
OUT ?=
HOMEPAGE ?=
WHEEL_URL ?=
BENCH ?=
MINUTES ?=
BODIES ?=
ONLY ?=
MODELS ?=
SPEECH ?=
TRACES ?=
TEMPLATES ?=
ZOO ?=
URL ?= http://127.0.0.1:8000
UV_VERSION := 0.13.8
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
BIN := .venv/bin
FILES ?=
SAMPLE ?= 12
SEED ?= 0
COSMIC_RAY_VERSION := 8.7.0
COSMIC_RAY := build/cosmic-ray-$(COSMIC_RAY_VERSION)
# For tests that may take long.
NO_HURRY := --override-ini faulthandler_timeout=3600

# Where it is set, each of a cluster's processes compiles anew what it imports: two thirds of the time they take to start.
export PYTHONDONTWRITEBYTECODE =

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: .venv/.runtime ## Serve the models of CONFIG=configs/one-mac.yaml, on PORT=8000; Ctrl-C stops
	@$(SHOW); exec $(BIN)/satchel serve --config "$(CONFIG)" $(if $(PORT),--port "$(PORT)")

install: | $(UV) ## Install the command satchel for this user, as requirements.lock pins it (uv tool install)
	@$(FIND_PYTHON); \
	echo datasets | $(UV) tool install --quiet --reinstall-package satchel --python "$$("$$found" -c 'import sys; print(sys.executable)')" \
		--constraints requirements.lock --excludes - .
	@echo "Installed. If \`satchel\` is not found: uv tool update-shell"

test: .venv/.development ## Run all tests
	@$(BIN)/python -m pytest tests -n 3 --durations 15

test-slow: .venv/.development ## Run the tests that take long and say little that others do not, and long simulations
	@$(BIN)/python -m pytest tests -m slow $(NO_HURRY)
	@SATCHEL_SIMULATIONS=300 $(BIN)/python -m pytest $(NO_HURRY) tests/simulations tests/actors/kv_store/agents/test_roles_simulation.py

test-metal: .venv/.development ## Compare kernels' text for Metal with the reference in every shape, on a CPU (30 minutes)
	@$(BIN)/python -m pytest tests/actors/replica/kernels -m metal $(NO_HURRY)

test-clients: .venv/.development build/clients/.ready build/clients/venv/.ready ## Run agent programs and frameworks against a server; needs Node.js
	@$(BIN)/python -m pytest tests/clients -m clients $(NO_HURRY)

test-page: .venv/.development build/page/venv/.ready ## Use the page in a headless Chromium, against a cluster; needs a chromium on the path
	@$(BIN)/python -m pytest tests/page -m page $(NO_HURRY)

test-real: .venv/.development ## Serve real checkpoints and compare with mlx-lm and mlx-audio: MODELS="folder folder", SPEECH="recording.wav" with recording.txt
	@test -n "$(MODELS)" || { echo "Name the folders of some models, as mlx-lm loads them: make test-real MODELS=folder" >&2; exit 1; }
	@SATCHEL_REAL_MODELS="$(MODELS)" SATCHEL_REAL_SPEECH="$(SPEECH)" $(BIN)/python -m pytest tests/real -m real -v $(NO_HURRY) --durations 15

test-zoo: .venv/.development ## Check how every type of mlx-lm and mlx-vlm is served (30 minutes); ZOO="gemma2 mamba" for some
	@$(BIN)/python -m tests.zoo.run $(ZOO)

test-mutants: .venv/.development $(COSMIC_RAY)/.ready ## Is a small fault in a pure file noticed? FILES="cluster/placement.py" SAMPLE=50 SEED=1 for others
	@$(COSMIC_RAY)/bin/python tests/mutants/run.py --sample $(SAMPLE) --seed $(SEED) $(FILES)

# Node's usual limit is near what pyright needs, and there garbage collection takes long; with its usual room for new
# objects it takes a tenth of the time.
check: .venv/.development ## Lint, formatting, types, and who imports whom
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@NODE_OPTIONS="--max-old-space-size=8192 --max-semi-space-size=128" $(BIN)/pyright
	@$(BIN)/lint-imports

format: .venv/.development ## Format the code and mend what lint can mend
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

train-recall: ## Train the small text model anew into OUT=build/recall, with a PYTHON that has PyTorch and a GPU
	@$(PYTHON) -c 'import torch, safetensors, tokenizers' 2>/dev/null || \
		{ echo "\"$(PYTHON)\" has no torch, safetensors and tokenizers; training needs them, and an NVIDIA GPU" >&2; exit 1; }
	@$(PYTHON) -m training.recall.train --out "$(or $(OUT),build/recall)" --tokenizer actors/model_files/embedded/recall

train-shapes: ## Train the small vision model anew into OUT=build/shapes, with a PYTHON that has PyTorch and a GPU
	@$(PYTHON) -c 'import torch, safetensors, tokenizers' 2>/dev/null || \
		{ echo "\"$(PYTHON)\" has no torch, safetensors and tokenizers; training needs them, and an NVIDIA GPU" >&2; exit 1; }
	@$(PYTHON) -m training.shapes.train --out "$(or $(OUT),build/shapes)" --tokenizer actors/model_files/embedded/shapes

eval-shapes: .venv/.development ## Measure the small vision model that ships with Satchel
	@$(BIN)/python -m benchmarks.embedded.shapes

eval-recall: .venv/.development ## Measure the small text model that ships with Satchel
	@$(BIN)/python -m benchmarks.embedded.recall

bench-serve: .venv/.development ## Measure serving beside other servers; BENCH="--models recall --agents 8,32" options, TRACES=folder adds recorded agents
	@$(BIN)/python -m benchmarks.serve.run $(if $(TRACES),--traces "$(TRACES)") $(BENCH)

bench-batch: .venv/.development ## Measure what a batch of 1,000 items costs 16 streams; BENCH="--rounds 1" for options
	@$(BIN)/python -m benchmarks.batch $(BENCH)

bench-router: .venv/.development ## Measure the router beside others; TRACES=folder adds recorded conversations, BENCH="--parts nodes-8" options
	@$(BIN)/python -m benchmarks.router.run $(if $(TRACES),--traces "$(TRACES)") $(BENCH)
	@$(BIN)/python -m benchmarks.prefix

bench-memory: .venv/.development ## Measure the KV memory; TRACES=folder adds recorded conversations, BENCH="--parts sizes" options
	@$(BIN)/python -m benchmarks.memory.run $(if $(TRACES),--traces "$(TRACES)") $(BENCH)

bench-cluster: .venv/.development ## Measure several nodes; BENCH="--parts moving" options
	@$(BIN)/python -m benchmarks.cluster.run $(BENCH)

bench-group: .venv/.development ## Measure a model divided between two processes; BENCH="--parts decoding" options
	@$(BIN)/python -m benchmarks.group.run $(BENCH)

bench-vision: .venv/.development ## Measure pictures and videos; BENCH="--parts turns --rounds 1" options
	@$(BIN)/python -m benchmarks.vision.run $(BENCH)

examples: .venv/.development ## Run the examples on the server at URL=http://127.0.0.1:8000; TRACES=folder adds recordings
	@$(BIN)/python -m examples.run --url "$(URL)" $(if $(TRACES),--traces "$(TRACES)") $(BENCH)

bench-templates: .venv/.development ## Measure what chat templates forget: TEMPLATES=folder of NAME.jinja, TRACES=folder of recordings
	@$(BIN)/python -m benchmarks.templates.run --templates "$(TEMPLATES)" --traces "$(TRACES)" $(BENCH)

bench-recipe: .venv/.development ## Measure recipes of quantized weights; BENCH="--model qwen3-0.6b --recipes 4,8-4-4" options
	@$(BIN)/python -m benchmarks.recipes $(BENCH)

bench-quality: .venv/.development ## Measure what 4-bit KV does to answers on real text: MODELS="folder folder", BENCH="--lengths 1024" options
	@$(BIN)/python -m benchmarks.quality.run --models "$(MODELS)" $(BENCH)

bench-papers: .venv/.development ## Run papers' own experiments, and write one page; BENCH="--parts ml-drift --resume" options
	@$(BIN)/python -m benchmarks.papers.run $(BENCH)

bench-checkpoints: .venv/.development ## Measure how real checkpoints start, go on, call tools and keep to schemas: MODELS="folder folder"
	@$(BIN)/python -m benchmarks.checkpoints.run --models "$(MODELS)" $(BENCH)

soak: .venv/.development ## Kill a server and fill its disk for MINUTES=60 while agents talk, and compare; BENCH="--disk tenth" options
	@$(BIN)/python -m tests.soak.run $(if $(MINUTES),--minutes "$(MINUTES)") $(BENCH)

attack: .venv/.development ## Attack a server of its own on loopback while 16 clients stream, for MINUTES=20; BODIES=500 ONLY=raw,large for less
	@$(BIN)/python -m tests.attack.run $(if $(MINUTES),--minutes "$(MINUTES)") $(if $(BODIES),--bodies "$(BODIES)") \
		$(if $(ONLY),--only "$(ONLY)") $(BENCH)

COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

lock: .venv/bin/python ## Write the lock files anew from pyproject.toml; UPGRADE=1 takes newer versions
	@$(COMPILE) pyproject.toml --group build --output-file requirements.lock
	@$(COMPILE) --group dev --constraint requirements.lock --output-file tests/requirements.lock
	@$(COMPILE) --group docs --constraint requirements.lock --output-file docs/requirements.lock
	@$(COMPILE) tests/clients/requirements.in --output-file tests/clients/requirements.lock
	@$(COMPILE) tests/page/requirements.in --output-file tests/page/requirements.lock

formula: .venv/.runtime ## Build a wheel, and a Homebrew formula for it: WHEEL_URL=where the wheel will be
	@test -n "$(WHEEL_URL)" || { echo "Say where the wheel will be: make formula WHEEL_URL=.../satchel-VERSION-py3-none-any.whl" >&2; exit 1; }
	@rm -rf build/release && mkdir -p build/release
	@$(UV) build --quiet --wheel --out-dir build/release .
	@UV="$(UV)" $(BIN)/python -m release.formula build/release/satchel-*.whl "$(WHEEL_URL)" \
		$(if $(HOMEPAGE),--homepage "$(HOMEPAGE)") >build/release/satchel.rb
	@cp requirements.lock build/release && ls build/release

# Symbolic links, for pages link to files outside docs/, and MkDocs knows one folder.
PAGES := README.md ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE docs examples training benchmarks tests configs
docs: .venv/.runtime build/docs/venv/.ready ## Build the documentation into build/docs/site; a dead link fails
	@$(BIN)/python -m docs.reference
	@rm -rf build/docs/source && mkdir -p build/docs/source
	@ln -s $(addprefix $(CURDIR)/,$(PAGES)) build/docs/source
	@NO_MKDOCS_2_WARNING=1 build/docs/venv/bin/mkdocs build --strict --config-file docs/mkdocs.yml
	@echo "build/docs/site/index.html"

clean: ## Remove the environment, caches and build results
	@rm -rf .venv .uv build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. `.runtime` and `.development` are stamps: made once, and again when a lock changes. An environment
# that has the development tools keeps them when `serve` brings it up to date.

SUITABLE = import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# MLX has no wheel for an Intel Python, also on Apple silicon, nor for an older macOS.
UNFIT_MAC = import platform; mac, machine = platform.mac_ver()[0], platform.machine(); \
	old = mac and int(mac.split(".")[0]) < 14; \
	print("Satchel needs macOS 14 or later; this is " + mac + "." if old else "This Python is for " + machine \
	+ ": Satchel needs one for arm64, on a Mac with Apple silicon." if mac and machine != "arm64" else "")

define FIND_PYTHON
found=; for candidate in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	if "$$candidate" -c '$(SUITABLE)' >/dev/null 2>&1; then found="$$candidate"; break; fi; \
	if [ "$(origin PYTHON)" != file ]; then break; fi; \
done; \
if [ -z "$$found" ]; then \
	echo "Satchel needs Python 3.11, 3.12 or 3.13; \"$(PYTHON)\" is none of them." >&2; \
	echo "Install one and name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; \
fi; \
unfit=$$("$$found" -c '$(UNFIT_MAC)'); \
if [ -n "$$unfit" ]; then echo "$$unfit" >&2; exit 1; fi
endef

.uv/bin/uv:
	@$(FIND_PYTHON); \
	echo "Installing uv $(UV_VERSION) into .uv"; \
	"$$found" -m venv .uv >.uv.log 2>&1 && .uv/bin/python -m pip install --quiet uv==$(UV_VERSION) >>.uv.log 2>&1 \
		|| { cat .uv.log >&2; rm -rf .uv .uv.log; \
			echo "uv could not be installed. Debian and Ubuntu want python3-venv first." >&2; exit 1; }; \
	rm -f .uv.log

.venv/bin/python: | $(UV)
	@$(FIND_PYTHON); \
	echo "Making .venv with $$("$$found" --version)"; \
	$(UV) venv --quiet --python "$$("$$found" -c 'import sys; print(sys.executable)')" .venv

# In some folders (Documents, Desktop) macOS hides what is in `.venv`. Python skips hidden .pth files, and by one of them
# it finds Satchel.
SHOW = if command -v chflags >/dev/null; then chflags nohidden .venv/lib/python3.*/site-packages/*.pth; fi

define INSTALL
@echo "Installing into .venv: Satchel and $(1)"
@$(UV) pip sync --quiet --python $(BIN)/python --require-hashes $(2)
@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
@$(SHOW)
endef

build/clients/.ready: tests/clients/package.json tests/clients/package-lock.json
	@echo "Installing the agent programs into build/clients (1 GB)"
	@mkdir -p build/clients && cp tests/clients/package.json tests/clients/package-lock.json build/clients
	@# Not `npm ci`: the lock leaves out packages of platforms that npm could not resolve where it was written.
	@cd build/clients && npm install --silent --no-fund --no-audit
	@touch $@

build/clients/venv/.ready: tests/clients/requirements.lock | .venv/bin/python
	@echo "Installing the frameworks into build/clients/venv"
	@$(UV) venv --quiet --clear --python $(BIN)/python build/clients/venv
	@$(UV) pip sync --quiet --python build/clients/venv/bin/python --require-hashes tests/clients/requirements.lock
	@touch $@

build/page/venv/.ready: tests/page/requirements.lock | .venv/bin/python
	@echo "Installing Playwright into build/page/venv"
	@$(UV) venv --quiet --clear --python $(BIN)/python build/page/venv
	@$(UV) pip sync --quiet --python build/page/venv/bin/python --require-hashes tests/page/requirements.lock
	@touch $@

build/docs/venv/.ready: docs/requirements.lock | .venv/bin/python
	@echo "Installing MkDocs into build/docs/venv"
	@$(UV) venv --quiet --clear --python $(BIN)/python build/docs/venv
	@$(UV) pip sync --quiet --python build/docs/venv/bin/python --require-hashes docs/requirements.lock
	@touch $@

# Apart from the others: what it needs, nobody else does. As it was at a day, so that it stays the same.
$(COSMIC_RAY)/.ready: | .venv/bin/python
	@echo "Installing Cosmic Ray $(COSMIC_RAY_VERSION) into $(COSMIC_RAY)"
	@$(UV) venv --quiet --python $(BIN)/python $(COSMIC_RAY)
	@$(UV) pip install --quiet --python $(COSMIC_RAY)/bin/python --exclude-newer 2026-11-22 cosmic-ray==$(COSMIC_RAY_VERSION)
	@touch $@

.venv/.runtime: requirements.lock pyproject.toml | .venv/bin/python
	$(if $(wildcard .venv/.development),\
	$(call INSTALL,what it runs and is developed with,requirements.lock tests/requirements.lock),\
	$(call INSTALL,what it runs with,requirements.lock))
	@touch $@

.venv/.development: requirements.lock tests/requirements.lock pyproject.toml | .venv/bin/python
	$(call INSTALL,what it runs and is developed with,requirements.lock tests/requirements.lock)
	@touch .venv/.runtime $@
