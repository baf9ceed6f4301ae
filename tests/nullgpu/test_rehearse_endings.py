"""Programs that end otherwise than by a trained step, and what their reports say of it."""

import sys

import pytest
from nullgpu.test_rehearse_programs import TORCHRUN

import shardscale

pytestmark = pytest.mark.usefixtures("in_a_folder")

MODEL = """\
import torch; CTC = (torch.ones(8, 1, 4, device="cuda"), torch.ones(1, dtype=torch.int32), [8], [1])
model = torch.nn.Linear(64, 64, device="cuda")
"""


@pytest.mark.parametrize(
    ("line", "library"),
    [
        ("torch._cudnn_ctc_loss(*CTC, 0, True, False)", "cuDNN's recurrent networks or CTC loss"),
        ("torch.nn.init.orthogonal_(model.weight)", "cuSOLVER"),
        ("torch.fft.rfft(model.weight)", "cuFFT"),
        ("torch.cuda.utilization()", "a reading of NVML"),
        # what the allocator cudaMallocAsync ends with
        ('raise RuntimeError("CUDA error: operation not supported")', "a function of CUDA"),
        (
            "import torch.distributed as dist, torch.distributed._symmetric_memory as symm; "
            'dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore()); '
            'symm.rendezvous(symm.empty(64, device="cuda"), dist.group.WORLD)',
            "a function of CUDA",
        ),
        ("torch.sparse.mm(model.weight.to_sparse(), model.weight)", "cuSPARSE"),
    ],
)
def test_a_library_that_the_null_gpu_lacks_is_no_error_of_the_program(
    line: str, library: str
) -> None:
    found = shardscale.rehearse(MODEL + line, gpu="T4")
    assert (found.verdict, found.record["null_gpu_lacks"]) == (None, library)
    headline, *report = repr(found).splitlines()
    assert headline.startswith("no verdict on T4")
    assert report[0].startswith(f"The program calls {library}, which the null GPU lacks: ")
    assert report[1] == f"  cell.py:3 in <module>: {line}"
    assert ("  try torch.backends.cudnn.enabled = False" in report[2]) == ("ctc" in line)
    assert "of its own" not in repr(found)


def test_a_signal_from_outside_is_no_error_of_the_program() -> None:
    found = shardscale.rehearse([MODEL, "import os", "os.kill(os.getpid(), 9)"], gpu="T4")
    assert (found.verdict, "of its own" in repr(found)) == (None, False)


ON_ONE_GPU = """\
import torch
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
"""


def test_ranks_that_select_the_same_gpu_are_an_error_as_nccls() -> None:
    command = (sys.executable, *TORCHRUN)
    found = shardscale.rehearse(ON_ONE_GPU, gpu="T4", command=command)
    assert found.verdict is None
    assert "Duplicate GPU detected : rank" in repr(found)
    assert "as torch.cuda.set_device(LOCAL_RANK) selects" in repr(found)


def test_a_progress_bar_ends_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    training = """
from tqdm import tqdm
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in tqdm(range(9)):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
    shardscale.rehearse(MODEL + training, gpu="T4")
    bar = capfd.readouterr().err.rpartition("\r")[2]
    assert bar.partition("\n")[0].endswith("it/s]")


def test_an_error_before_the_first_step_is_said() -> None:
    lines = ["print(model.weight.sum().item())", 'raise ValueError("no data")']
    found = shardscale.rehearse([MODEL, *lines], gpu="T4")
    assert (found.verdict, found.record["null_gpu_lacks"]) == (None, None)
    report = repr(found).splitlines()
    assert report[1] == "The program ended with an error: ValueError: no data"
    assert report[2].startswith("  cell.py:5 in <module>: raise")
    # It has read a value, so the error may be the rehearsal's.
    assert report[3].startswith("  It may come from a value that no kernel has computed: ")
    (read,) = found.record["ranks"][0]["values"]
    assert read["code"] == lines[0]


def test_an_error_of_a_program_that_has_read_no_value_is_its_own() -> None:
    report = repr(shardscale.rehearse([MODEL, 'raise ValueError("no data")'], gpu="T4"))
    assert "The program ended with an error of its own: ValueError: no data" in report
    assert "no kernel has computed" not in report


def test_reads_are_listed_by_line_and_kind_of_answer() -> None:
    lines = """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    with torch.no_grad():
        model(torch.ones(8, 64, device="cuda"))
    torch.zeros(1).cuda()
    loss = model(torch.ones(8, 64, device="cuda")).square().mean()
    for number in range(1, 4):
        kept = loss.expand(number * 10)[loss.expand(number * 10) > 0]
    seen = (bool((loss > 0).all()), loss.item())
    loss.backward()
    optimizer.step()
"""
    found = shardscale.rehearse([MODEL, lines], gpu="T4")
    reads = [(one["answer"], one["times"]) for one in found.record["ranks"][0]["values"]]
    # True is equal to 1.0, and yet another answer; three counts are one line.
    assert reads == [("all 10 to 30 elements", 9), (True, 3), (1.0, 3)]
    report = repr(found)
    assert "  held at the peak (later steps: " in report
    assert report.count("  load ") == 1


def test_an_end_after_the_last_recorded_step_is_no_error() -> None:
    loop = """\
import os
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    loss = model(torch.ones(8, 64, device="cuda")).sum()
    if step == 3:
        os.kill(os.getpid(), 9)
    loss.backward()
    optimizer.step()
"""
    found = shardscale.rehearse([MODEL, loop], gpu="T4")
    assert found.verdict == "fits"
    assert "of its own" not in repr(found)


def test_an_evaluation_and_a_save_are_no_part_of_a_steps_seconds() -> None:
    loop = """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(512, 64, device="cuda")
for step in range(9):
    model(inputs).sum().backward()
    optimizer.step()
    if apart:
        with torch.no_grad():
            for _ in range(50):
                model(inputs).square().mean()
        torch.save(model.state_dict(), "model.pt")
"""
    with_them, without = (
        shardscale.rehearse([MODEL, f"apart = {apart}", loop], gpu="T4") for apart in (True, False)
    )
    assert with_them.step_s == without.step_s
    assert "left out of it: checkpoint, evaluation" in repr(with_them)
    assert "every step is followed by forwards without gradients" in repr(with_them)
    assert "left out" not in repr(without)
    not_reached = "  not in it: an evaluation or a save after the first 3 steps"
    assert (not_reached in repr(with_them), not_reached in repr(without)) == (False, True)
    assert "every step is followed" not in repr(without)
    saved = "  the program saved files with values that no kernel has computed: delete them"
    assert (saved in repr(with_them), saved in repr(without)) == (True, False)


SEARCH = """\
import torch
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
batch = 1 << 23
for step in range(40):
    try:
        model(torch.ones(batch, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    except torch.OutOfMemoryError:
        batch //= 8
"""
SMALLER_STATES = """\
import gc, torch
model = torch.nn.Linear(1 << 15, 1 << 15, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    model(torch.ones(8, 1 << 15, device="cuda")).sum().backward()
    try:
        optimizer.step()
    except torch.OutOfMemoryError:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    gc.collect()
"""


@pytest.mark.parametrize(
    ("program", "line"),
    [(SEARCH, "cell.py:7"), (SMALLER_STATES, "cell.py:7")],
    ids=["batch", "optimizer"],
)
def test_out_of_memory_that_the_program_catches(program: str, line: str) -> None:
    found = shardscale.rehearse(program, gpu="T4")
    events = found.record["out_of_memory"]
    assert (found.verdict, found.record["steps"]) == ("fits", 3)
    times = "once" if len(events) == 1 else f"{len(events)} times"
    report = repr(found).splitlines()
    assert report[1].startswith(f"It ran out of memory {times}, caught by the program, the last")
    assert f" at {line}; " in report[1]
    assert found.record["cards"] == []  # on another GPU it would come to something else
    (rank,) = found.record["ranks"]
    assert "activations" not in rank["end"]["by_category"]


def test_out_of_memory_that_ends_the_program_by_its_own_hand() -> None:
    program = SEARCH.replace("batch //= 8", "break")
    found = shardscale.rehearse(program, gpu="T4")
    assert found.verdict == "does not fit"
    report = repr(found)
    assert "It ran out of memory once, caught by the program, the last at cell.py:7" in report
    assert "it took no step after that" in report
    assert "Without a limit it needs" in report


EXPANDABLE = """\
import torch
torch.cuda.memory._set_allocator_settings("expandable_segments:True")
model = torch.nn.Linear(1 << 13, 1 << 13, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
streams = [torch.cuda.Stream() for _ in range(6)]
for step in range(4):
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.ones(1 << 22, device="cuda"), torch.ones(8, device="cuda")
    model(torch.ones(1 << 20, 1 << 13, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_there_are_addresses_for_expandable_segments_without_a_limit() -> None:
    found = shardscale.rehearse(EXPANDABLE, gpu="T4", gpus=8)
    assert found.verdict == "does not fit"
    assert "Without a limit it needs (rank 0, 3 steps" in repr(found)


LARGE_STATES = """\
import sys, torch
def main():
    model = torch.nn.Linear(1 << 15, 1 << 15, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(9):
        model(torch.ones(8, 1 << 15, device="cuda")).sum().backward()
        optimizer.step()
try:
    main()
except Exception as error:
    {end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(1)",
        'raise RuntimeError("too large") from error',
        "import torch._inductor.exc as made; raise made.InductorError(error, None) from None",
    ],
)
def test_out_of_memory_that_the_program_turns_into_another_error(end: str) -> None:
    """Hydra catches every error, and exits."""
    found = shardscale.rehearse(LARGE_STATES.format(end=end), gpu="T4")
    assert found.verdict == "does not fit"
    assert "Out of memory in step: rank 0 asked for" in repr(found)
    assert "  cell.py:7 in main: optimizer.step()" in repr(found)


def test_out_of_memory_of_a_program_that_starts_only_once() -> None:
    once = 'import os; os.mkdir("out")'  # as trainers that overwrite nothing
    found = shardscale.rehearse([once, LARGE_STATES.format(end="raise")], gpu="T4")
    assert found.verdict == "does not fit"
    assert found.record["ranks"][0]["allocated_peak_bytes"] > 2**33
    assert "started again without a limit, it did not train" in repr(found)


def test_out_of_memory_behind_a_whole_step() -> None:
    loop = """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(1 << 25, 64, device="cuda"))
except torch.OutOfMemoryError:
    pass
"""
    found = shardscale.rehearse([MODEL, loop], gpu="T4")
    assert found.verdict == "does not fit"
    assert "Out of memory in evaluation: rank 0 asked for" in repr(found)


def test_the_hosts_memory_is_not_the_gpus() -> None:
    found = shardscale.rehearse([MODEL, "import numpy", "numpy.zeros(1 << 55)"], gpu="T4")
    assert found.verdict is None
    assert "The program ended with an error of its own: MemoryError: Unable to" in repr(found)


@pytest.mark.parametrize("batch", ["1 << 25", "1 << 28"], ids=["forward", "inputs"])
def test_a_larger_step_behind_those_that_are_recorded(batch: str) -> None:
    loop = """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in (8, 8, 8, LARGE):
    model(torch.ones(batch, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
    found = shardscale.rehearse([MODEL, loop.replace("LARGE", batch)], gpu="T4")
    assert found.verdict == "does not fit"
    assert "Without a limit it needs (rank 0, 4 steps" in repr(found)


def test_a_program_on_the_cpu_gets_no_verdict() -> None:
    program = MODEL.replace(', device="cuda"', "")
    loop = "model(torch.ones(8, 64)).sum().backward()"
    found = shardscale.rehearse([program, loop], gpu="T4")
    assert found.verdict is None
    assert "no process has trained with torch on the GPU" in repr(found)


TEACHER = """\
import torch
teacher = torch.nn.Linear(1 << 15, 1 << 15, bias=False, device="cuda").requires_grad_(False)
model = torch.nn.Linear(1 << 14, 1 << 14, bias=False, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
with torch.no_grad():
    teacher(torch.ones(8, 1 << 15, device="cuda"))
model(torch.ones(1 << 17, 1 << 14, device="cuda")).sum().backward()
optimizer.step()
"""


def test_a_teacher_is_no_activation_and_not_what_is_trained() -> None:
    found = shardscale.rehearse(TEACHER, gpu="T4")
    assert found.verdict == "does not fit"
    assert f"Linear, {1 << 28:,} parameters" in repr(found)
    assert "alive then: activations 8.00GiB, other 4.00GiB, params 1.00GiB" in repr(found)
