"""An NVML that fails, in every way, beside training that does not need it."""

from pathlib import Path

import pytest
from nullgpu.runs import GPU, Run, environment, train
from nvml_stub.stub import HERE, build_stub, script

UNKNOWN, LOST = "!999", "!15"
BROKEN = {
    "no library": None,
    "init fails": {"init": "!9"},
    "no GPU of this UUID": {"uuid": "GPU-99999999-0000-0000-0000-000000000000"},
    "no handle": {"handle": "!4"},
    "no count": {"count": UNKNOWN},
    "readings fail on the way": {
        **{"used": f"1 1 {UNKNOWN}", "total": f"{GPU.memory_bytes} {GPU.memory_bytes} {UNKNOWN}"},
        **{"power": f"1 {UNKNOWN}", "energy": f"1 {UNKNOWN}", "temperature": "!3"},
    },
    "the GPU is lost": {"used": f"1 {LOST}", "power": LOST},
}
WAYS = {
    "single": (),
    "zero": ("--zero", "2"),
    "zero3": ("--zero", "3", "--activation-checkpointing", "full"),
}


def broken(folder: Path, name: str, *flags: str) -> Run:
    """A run whose libnvidia-ml.so.1 answers so, or is not there."""
    answers, folder = BROKEN[name], folder / "broken"
    folder.mkdir()
    often = ("--steps", "6", "--precision", "bf16")
    libraries = environment(folder)["LD_LIBRARY_PATH"]
    if answers is None:
        for library in ("libcuda.so", "libcuda.so.1"):
            (folder / library).symlink_to(Path(libraries.split(":")[0]) / library)
        return train(folder, *often, *flags, more={"LD_LIBRARY_PATH": str(folder)})
    path = folder / "broken.txt"
    path.write_text(script({"total": str(GPU.memory_bytes), **answers}))
    stub = build_stub(folder / "stub", str(HERE / "more.c"))
    more = {"NVML_STUB_SCRIPT": str(path), "LD_LIBRARY_PATH": f"{stub}:{libraries}"}
    return train(folder, *often, *flags, more=more)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BROKEN)
def test_training_ends_well_without_nvml(name: str, way: str, tmp_path: Path) -> None:
    run = broken(tmp_path, name, *WAYS[way])
    assert run.code == 0, run.output[-4000:]
    assert run.json("status.json")["state"] == "completed"
    assert len(run.records("step")) == 6


@pytest.mark.parametrize("name", ["no library", "init fails", "no handle"])
def test_out_of_memory_is_told_as_such_without_nvml(name: str, tmp_path: Path) -> None:
    # torch asks NVML who else has memory, to say so in its message.
    run = broken(tmp_path, name, "--memory-limit", "80MiB", "--micro-batch", "64")
    assert run.code == 3, run.output[-4000:]
    assert run.json("status.json")["state"] == "oom"
