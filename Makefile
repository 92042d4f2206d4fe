# `make demo` and `make test` do everything on a fresh machine; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK := requirements.lock
TORCH := $(shell sed -n 's/^. torch==/torch==/p' $(LOCK))
# The empty variable lets child processes keep what they compile.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist worksteal

.PHONY: demo test test-core test-slow test-long lint docs golden bench ledgers mutants wheel-demo clean

demo: $(VENV)/.base
	$(BIN)/videotune demo --out demo

test: $(VENV)/.dev lint
	$(PYTEST) -n 2 -m "not long and not slow"

# goldens, the family contract, exact resume with a kill, exports read back: for every commit
test-core: $(VENV)/.dev
	$(PYTEST) -n 2 -m "not long and not slow" tests/trainer/test_golden.py tests/models/test_family_contract.py \
	    tests/commands/test_exact_state.py tests/exporter/test_export_kinds.py

# fuzz, rehearsals of benchmarks, docs, the studio in a browser; three at a time, because many wait for processes
test-slow: $(VENV)/.dev
	$(PYTEST) -n 3 -m "slow and not long"
	@unshare --map-root-user --net true 2>/dev/null || \
	    echo "no network namespaces (unshare --map-root-user --net), so runs that lose a host were NOT TESTED"
	@command -v chromium >/dev/null || echo "no Chromium on PATH, so the studio was not tested in a browser: apt-get install chromium"

test-long: $(VENV)/.dev
	$(PYTEST) -n 2

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/house.py

# the wheel, installed with all its extras into a fresh environment, and the demo from there
wheel-demo: $(VENV)/.dev
	rm -rf dist build $(VENV)-wheel
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/pip install -q --disable-pip-version-check $(TORCH)
	$(VENV)-wheel/bin/pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt "$$(ls dist/*.whl)[all]"
	cd dist && ../$(VENV)-wheel/bin/videotune demo --out demo

# the pages of docs/ as a site in site/
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

golden: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/trainer/test_golden.py --bit-for-bit

# the tables from which presets are planned in a second; NEW=--new reads only what is missing
ledgers: $(VENV)/.base
	OMP_NUM_THREADS=1 $(BIN)/python scripts/write_ledgers.py $(NEW)

# lines made wrong, one at a time, and which of them no test notices: FILES="videotune/…", or what the last commit changed
mutants: $(VENV)/.dev
	$(BIN)/python scripts/mutants.py $(FILES)

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/step.py

# torch goes first and alone, so that nothing else chooses its build; constraints.txt has the versions without hashes, for pip -c
$(VENV)/.torch: $(LOCK)
	@echo "installing packages, some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(TORCH)
	sed -n 's/^\([a-z0-9.-]*==[^ ]*\).*/\1/p' $(LOCK) > $(VENV)/constraints.txt
	touch $@

# all else as locked, by hash; videotune itself without a look at what it needs
$(VENV)/.base: $(VENV)/.torch pyproject.toml
	sed '/^# for development/,$$d' $(LOCK) > $(VENV)/runtime.txt
	$(PIP) install -q --require-hashes --no-deps -r $(VENV)/runtime.txt
	$(PIP) install -q --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install -q --require-hashes --no-deps -r $(LOCK)
	$(PIP) install -q --no-deps --no-build-isolation -e .
	touch $@ $(VENV)/.base

clean:
	rm -rf $(VENV) $(VENV)-wheel demo build dist site *.egg-info
