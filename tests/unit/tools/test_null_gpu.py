"""The null GPU, as far as it needs no CUDA build of torch: who may use it, and what it is."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.measure.hardware import GPUS, Gpu, find_gpu, gpu_named
from launcher.tools.rehearse.build import built_for, torch_of
from launcher.tools.rehearse.null_gpu import cuda_name, environment
from launcher.util.errors import UserError


def interpreter(folder: Path, version: str) -> str:
    """A Python whose torch has this version.py, and cannot be imported."""
    package = folder / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "version.py").write_text(version)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


CUDA = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
CPU = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_program_takes_the_gpu_for_what_it_is(gpu: Gpu) -> None:
    assert find_gpu(cuda_name(gpu)) is gpu


def test_torch_is_found_without_importing_it(tmp_path: Path) -> None:
    torch = torch_of(interpreter(tmp_path, CUDA))
    assert (torch.version, torch.cuda) == ("2.13.0+cu130", "13.0")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (CPU, r"torch 2\.13\.0\+cpu of .* is a CPU build"),
        ("", "torch unknown of .* is a CPU build"),
    ],
)
def test_a_cpu_build_is_refused(version: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        built_for(interpreter(tmp_path, version))


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be started"):
        built_for(str(tmp_path / "python"))
    with pytest.raises(UserError, match="no Python that works"):
        built_for("/bin/false")


def test_a_missing_compiler_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreter(tmp_path, CUDA)
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(UserError, match=r"no C compiler \(no-such-compiler\), .* install gcc"):
        built_for(python)


@pytest.mark.skipif(find_spec("nvidia") is not None, reason="CUDA's headers are installed")
def test_a_build_without_headers_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"cannot compile the null GPU .*cu\w+\.h"):
        built_for(interpreter(tmp_path, CUDA))
    assert list((tmp_path / "cache" / "null-gpu").glob("*/")) == []  # nothing half


@pytest.mark.parametrize("name", ["with space", "with:colon"])
def test_a_cache_that_cannot_be_preloaded_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path / name))
    with pytest.raises(UserError, match="set SHARDSCALE_CACHE"):
        built_for(interpreter(tmp_path, CUDA))


def test_no_gpus_are_refused() -> None:
    for count in (0, 65):
        with pytest.raises(UserError, match=f"{count} GPUs"):
            environment(sys.executable, [gpu_named("h100")] * count)
