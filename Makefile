# `make demo` and `make test` are self-contained on a machine with Python 3.11+ and gcc.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: install packages demo docs test test-nvme test-rehearse check house clean

install: $(VENV)/installed

# Pinned, because an unpinned torch brings gigabytes of CUDA to a machine without a GPU. pip would
# compile 17,000 files on one core. Packages' own tests and models of transformers, a third of them,
# wait until one is imported; a few others are for newer Pythons and do not compile.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/|/testing/|/transformers/models/' $(VENV)/lib || true
	touch $@

# A small model with 2 processes, then four ways of sharding side by side:
# one table, one page.
demo: install
	$(BIN)/torchrun --nproc 2 -m launcher.train --config bench/small.yaml --zero 2 --steps 600 \
	    --log-every 50 --out $(DEMO)/zero2
	$(BIN)/shardscale sweep --nproc 2 --config bench/small.yaml --grid strategy=ddp,fsdp,zero2,zero3 \
	    --steps 20 --memory-trace --out $(DEMO)/sharding
	@echo "the page: $(DEMO)/sharding/report/report.html"

# The documentation, as a site of static pages in site/: open it with
# `python -m http.server --directory site`. A broken link ends it. Where there is a calculator
# (`shardscale site`), it becomes site/calculator/.
docs: install
	rm -rf site build/calculator
	! $(BIN)/shardscale --help | grep -q '^  site ' || $(BIN)/shardscale site build/calculator
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "the site: site/index.html"

# Slurm and a browser come from Debian's packages where this is root and apt exists; without them
# their tests are skipped and say so.
packages:
	sh tests/slurm/install.sh
	sh tests/browser/install.sh
	sh tests/offload/install.sh

# Debian's packages come while pip installs. Hundreds of processes import the same modules, so they
# are compiled once, whatever is set here. Three workers for two cores, since tests wait for each
# other's ranks; tests/distributed, which has the longest files, comes before tests/unit.
test:
	$(MAKE) --jobs=2 install packages
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# Real swap files. DeepSpeed's I/O is compiled first, which takes minutes, once per machine.
test-nvme: install
	sh tests/offload/install.sh
	SHARDSCALE_TEST_NVME=1 $(BIN)/python -m pytest -q -m nvme

# The launcher on torch's CUDA build and a GPU that computes nothing, which are 8 GB to download and
# keep. `===` takes the package index's build and no other, which is the one for CUDA. For another
# version of torch: make test-rehearse NULLGPU_TORCH=2.11.0 NULLGPU=.venv-nullgpu-2.11
NULLGPU := .venv-nullgpu
NULLGPU_TORCH := 2.13.0
NULLGPU_PYTHON := $(shell for p in python3.14 python3.13 python3.12 python3.11 $(PYTHON); do \
    $$p -c '' 2>/dev/null && echo $$p && break; done)

$(NULLGPU)/installed: pyproject.toml constraints.txt
	$(NULLGPU_PYTHON) -m venv $(NULLGPU)
	grep -v '^torch==' constraints.txt > $(NULLGPU)/constraints.txt
	$(NULLGPU)/bin/python -m pip install --quiet --no-compile -c $(NULLGPU)/constraints.txt \
	    torch===$(NULLGPU_TORCH) torchao transformers accelerate -e . pytest pytest-xdist
	$(NULLGPU)/bin/python -m compileall -qq -j 0 $(NULLGPU)/lib || true
	touch $@

test-rehearse: $(NULLGPU)/installed
	SHARDSCALE_TEST_REHEARSE=1 $(NULLGPU)/bin/python -m pytest -q -n 2 tests/nullgpu

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Lines, files, classes and flags by wing, and the files that a training loads.
house: install
	$(BIN)/python bench/house.py

clean:
	rm -rf $(VENV) $(NULLGPU) runs sweeps build site *.egg-info
