"""Large tensors of the host in a rehearsal: beyond the budget they share their pages."""

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


def test_blocks_beyond_the_budget_share_their_pages(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build the library with")
    preloaded, caller = tmp_path / "host.so", tmp_path / "libc10.so"
    (tmp_path / "caller.c").write_text(CALLER)
    build = [compiler, *FLAGS, "-shared", "-Werror", f"-I{SOURCES}", "-ldl"]
    for source, output in ((SOURCES / "host.c", preloaded), (tmp_path / "caller.c", caller)):
        subprocess.run([*build, str(source), "-o", str(output)], check=True)
    environ = {
        **os.environ,
        "LD_PRELOAD": str(preloaded),
        "SHARDSCALE_STAND_IN_HOST_BYTES": str(100 * MIB),
    }
    command = [sys.executable, "-c", PROGRAM, str(caller)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    # The first is within the budget, the second beyond it, the third no large one; then it is free.
    assert found["repeats"] == [0, 64 * MIB, 0, 0]
    assert found["seen"] == 7
    assert found["kib"] < 200 * 1024
