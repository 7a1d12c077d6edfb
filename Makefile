# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: env demo test lint bench clean

env: .venv/ready

# torch first: Horovod is compiled against it. The wheel is kept in the user's cache, so it is built once.
# seqeval has no wheel: built with the pinned tools, since an isolated build takes the newest ones, whatever they are.
.venv/ready: setup.py constraints.txt scripts/horovod_wheel.sh
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(scripts/horovod_wheel.sh $(BIN)/python)"
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools_scm wheel
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt seqeval
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[nlu,dev]'
	touch $@

demo: env
	horovodrun -np 2 --gloo python -m tasks.demo

# One process for each core, one thread each; a file stays together, for the sake of what its tests share, and the
# longest files come first (tests/conftest.py).
test: lint
	scripts/browser.sh
	OMP_NUM_THREADS=1 python -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: env
	ruff check .
	ruff format --check .
	mypy

# Reduced versions of the measurements, on generated data, into runs/bench. benchmarks/README.md lists the full commands.
bench: env
	python -m benchmarks.bench

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
