"""Host memory in a rehearsal: large tensors share pages beyond the budget, and files are mapped."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.tools.rehearse.build import FLAGS, SOURCES

MIB = 1 << 20
CALLER = """
#include <stdlib.h>
void *take(size_t bytes) { void *at; return posix_memalign(&at, 64, bytes) ? NULL : at; }
void give(void *at) { free(at); }
"""
MAPPER = """
#define _GNU_SOURCE
#include <sys/mman.h>
int maps(int file, size_t bytes) {
    void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    return at == MAP_FAILED || munmap(at, bytes) ? 0 : 1;
}
"""
LARGER_THAN_MEMORY = 1 << 42
PROGRAM = r"""
import ctypes, json, re, sys
caller, library = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(None)
for function in (caller.take, library.shardscale_repeats):
    function.restype = ctypes.c_void_p if function is caller.take else ctypes.c_size_t
    function.argtypes = [ctypes.c_size_t if function is caller.take else ctypes.c_void_p]
caller.give.argtypes = [ctypes.c_void_p]
first, second, small = caller.take(64 << 20), caller.take(6 << 30), caller.take(1000)
repeats = [library.shardscale_repeats(at) for at in (first, second, small)]
ctypes.c_long.from_address(second).value = 7
seen = ctypes.c_long.from_address(second + repeats[1]).value
ctypes.memset(second, 0, 512 << 20)
shared = re.search(r"Pss: +(\d+)", open("/proc/self/smaps_rollup").read())
for at in (first, second, small):
    caller.give(at)
again = caller.take(64 << 20)
repeats.append(library.shardscale_repeats(again))
print(json.dumps({"repeats": repeats, "seen": seen, "kib": int(shared[1])}))
"""


def compiled(folder: Path, name: str, source: str | Path) -> str:
    """Compile a shared library; return its path."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build the library with")
    if isinstance(source, str):
        (folder / f"{name}.c").write_text(source)
        source = folder / f"{name}.c"
    output = folder / f"{name}.so"
    build = [compiler, *FLAGS, "-shared", "-Werror", f"-I{SOURCES}", str(source), "-ldl"]
    subprocess.run([*build, "-o", str(output)], check=True)
    return str(output)


def printed(program: str, *words: str, preloaded: str) -> str:
    """Return what a program prints beside the library."""
    environ = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "SHARDSCALE_NULL_GPU_HOST_BYTES": str(100 * MIB),
    }
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def test_blocks_beyond_the_budget_share_their_pages(tmp_path: Path) -> None:
    caller = compiled(tmp_path, "libc10", CALLER)
    preloaded = compiled(tmp_path, "host", SOURCES / "host.c")
    found = json.loads(printed(PROGRAM, caller, preloaded=preloaded))
    # The first is within the budget, the second beyond it, the third no large one; then it is free.
    assert found["repeats"] == [0, 64 * MIB, 0, 0]
    assert found["seen"] == 7
    assert found["kib"] < 200 * 1024


def test_a_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(LARGER_THAN_MEMORY)
    program = (
        "import ctypes, os, sys; maps = ctypes.CDLL(sys.argv[1]).maps\n"
        "maps.argtypes = [ctypes.c_int, ctypes.c_size_t]\n"
        f"print(maps(os.open(sys.argv[2], os.O_RDONLY), {LARGER_THAN_MEMORY}))"
    )
    words = (compiled(tmp_path, "mapper", MAPPER), str(weights))
    preloaded = compiled(tmp_path, "host", SOURCES / "host.c")
    assert printed(program, *words, preloaded=preloaded) == "1\n"
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "0":
        assert printed(program, *words, preloaded="") == "0\n"
