# `make demo` and `make test` do all their own set-up on a machine with Python 3.11+ and gcc.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: install packages demo test test-nvme check clean

install: $(VENV)/installed

# Pinned, because an unpinned torch brings gigabytes of CUDA to a machine without a GPU. pip would
# compile 15,000 files on one core; a few of them are for newer Pythons and do not compile.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# A small model with 2 processes, then four ways of sharding side by side:
# one table, one page.
demo: install
	$(BIN)/torchrun --nproc 2 -m launcher.train --config bench/small.yaml --zero 2 --steps 600 \
	    --log-every 50 --out $(DEMO)/zero2
	$(BIN)/shardscale sweep --nproc 2 --config bench/small.yaml --grid strategy=ddp,fsdp,zero2,zero3 \
	    --steps 20 --memory-trace --out $(DEMO)/sharding
	@echo "the page: $(DEMO)/sharding/report/report.html"

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

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs sweeps build *.egg-info
