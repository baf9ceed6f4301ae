# Two commands do all their own set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo

.PHONY: demo test check install clean

install: $(VENV)/installed

# Pinned, because an unpinned torch brings gigabytes of CUDA to a machine without a GPU.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# The main job on the embedded corpus with 2 processes, then what it wrote.
demo: install
	$(BIN)/python -m launcher.demo $(DEMO)

test: install
	$(BIN)/python -m pytest -q

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build *.egg-info
