"""Programs in plain torch, as tutorials have them: several optimizers or none, graphs, shards."""

import re
import sys

import pytest

import shardscale

pytestmark = pytest.mark.usefixtures("in_a_folder")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_counts_whole_parameters_and_names_the_models_modules(use_orig_params: bool) -> None:
    program = f"""\
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(3)]
model = torch.nn.Sequential(torch.nn.Linear(512, 512), *blocks)
policy = ModuleWrapPolicy({{torch.nn.Sequential}})
model = FSDP(model.cuda(), auto_wrap_policy=policy, use_orig_params={use_orig_params})
optimizer = torch.optim.Adam(model.parameters())
for _ in range(9):
    model(torch.ones(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = shardscale.rehearse(program, gpu="T4", command=TORCHRUN)
    assert f"in FullyShardedDataParallel, {4 * (512 * 512 + 512):,} parameters" in repr(found)
    modules = found.record["ranks"][0]["peak"]["by_module"]
    assert not [name for name in modules if "wrapped" in name or "module." in name]


def test_checks_of_the_program_hold() -> None:
    program = """\
import torch
lr = torch.tensor(0.1, device="cuda")
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, capturable=True)
x = torch.ones(8, 64, device="cuda")
torch.testing.assert_close(model(x), x @ model.weight.T + model.bias)
assert (model(x) - x).abs().max() < 1e-3
assert not model(x).isnan().any()
for _ in range(9):
    model(x).sum().backward()
    optimizer.step()
"""
    found = shardscale.rehearse(program, gpu="T4")
    assert found.verdict == "fits", repr(found)


def test_a_whole_step_in_a_cuda_graph(capfd: pytest.CaptureFixture[str]) -> None:
    program = """\
import torch
model = torch.nn.Linear(4096, 4096, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(1024, 4096, device="cuda")
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad()
with torch.cuda.graph(graph):
    model(x).square().mean().backward()
    optimizer.step()
print("reserved", torch.cuda.memory_reserved())
while True:
    graph.replay()
"""
    found = shardscale.rehearse(program, gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", 3)
    (rank,) = found.record["ranks"]
    (reserved,) = re.findall(r"^reserved (\d+)$", capfd.readouterr().err, re.MULTILINE)
    assert rank["reserved_peak_bytes"] == int(reserved)  # with the graph's own pool
    assert rank["seconds"] is None
    (line,) = [line for line in found.record["report"] if line.startswith("no seconds")]
    assert "the step replays CUDA graphs (1 times)" in line


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_step_that_replays_graphs_has_no_seconds(mode: str) -> None:
    program = f"""\
import torch
model = torch.nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, mode="{mode}")
for _ in range(9):
    compiled(torch.ones(512, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = shardscale.rehearse(program, gpu="H100")
    assert found.verdict == "fits"
    assert re.search(r"no seconds: the step replays CUDA graphs \(2 times\)", repr(found))


def test_weights_that_the_program_updates_by_itself() -> None:
    program = """\
import torch
model = torch.nn.Linear(64, 64, device="cuda")
while True:
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.zero_grad()
"""
    found = shardscale.rehearse(program, gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", 3)
    assert found.step_s
    assert "The program updates its weights without an optimizer" in repr(found)


def test_optimizers_that_step_in_turn_have_the_seconds_of_a_round() -> None:
    program = """\
import torch
first, second = (torch.nn.Linear(width, width, device="cuda") for width in (1024, 2048))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
while True:
    for repeats, model, optimizer in zip((2, 1), (first, second), optimizers):
        for _ in range(repeats):
            model(torch.ones(4096, model.in_features, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
    found = shardscale.rehearse(program, gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", 6)
    assert "2 optimizers step in turn" in repr(found)
    # Forward and gradients of weights: two steps of the first, one of the second.
    flops = 2 * 2 * 4096 * (2 * 1024**2 + 2048**2)
    assert found.record["ranks"][0]["seconds"]["products_s"] > flops / 8.1e12
    assert re.search(r"^A round of rank 0 would take", repr(found), re.MULTILINE)


def test_the_gpus_of_dataparallel_compute_side_by_side() -> None:
    program = """\
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(2)]).cuda()
model = torch.nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(8192, 4096, device="cuda")).sum().backward()
    optimizer.step()
"""
    found = shardscale.rehearse(program, gpu="T4", gpus=2)
    assert "launched by no operator" not in repr(found)
    (rank,) = found.record["ranks"]
    flops = 2 * 8192 * 4096**2 * 5  # no gradient of the inputs
    products_s = rank["seconds"]["products_s"]
    assert products_s == pytest.approx(flops / 8.1e12, rel=0.4)
    assert found.step_s is not None
    assert products_s / 2 < found.step_s - rank["seconds"]["messages_s"] < 0.7 * products_s


def test_a_thread_computes_in_the_middle_of_another_ones_product() -> None:
    program = """\
import threading
import torch
def beside(one, other):
    thread = threading.Thread(target=few.cos)
    thread.start()
    thread.join()
    return torch.addmm(one.new_zeros(1), one, other)
library = torch.library.Library("aten", "IMPL")
library.impl("mm", beside, "CUDA")
few, many = torch.ones(8, device="cuda"), torch.ones(4096, 4096, device="cuda")
weight = torch.nn.Parameter(many.clone())
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    (many @ weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    (rank,) = shardscale.rehearse(program, gpu="T4").record["ranks"]
    flops = 2 * 2 * 4096**3  # no gradient of the inputs
    assert rank["seconds"]["products_s"] == pytest.approx(flops / 8.1e12, rel=0.4)


def test_a_loader_that_is_forked_in_the_step_that_is_priced() -> None:
    program = """\
import torch
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.utils.data.TensorDataset(torch.ones(16, 64))
while True:
    for epoch in range(2):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        for (x,) in torch.utils.data.DataLoader(rows, batch_size=8, num_workers=1):
            model(x.cuda()).sum().backward()
    optimizer.step()
"""
    found = shardscale.rehearse(program, gpu="T4")
    assert found.verdict == "fits"
    assert found.step_s, repr(found)


def test_an_optimizer_that_gives_way_to_another_ends_nothing() -> None:
    program = """\
import torch
model = torch.nn.Linear(64, 64, device="cuda")
optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2)]
step = 0
while True:
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizers[step > 0].step()
    step += 1
"""
    found = shardscale.rehearse(program, gpu="T4")
    # the first one might step again in as many steps as a round of both has
    assert (found.verdict, found.record["steps"]) == ("fits", 8)
    assert found.step_s
    assert "in turn" not in repr(found)


def test_products_of_nested_tensors_have_prices() -> None:
    program = """\
import torch
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
parts = [torch.ones(rows, 1024, device="cuda") for rows in (1000, 3000)]
for _ in range(9):
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    model(x).values().sum().backward()
    optimizer.step()
"""
    found = shardscale.rehearse(program, gpu="T4")
    (rank,) = found.record["ranks"]
    assert rank["seconds"]["products_s"] > 2 * 2 * 4000 * 1024**2 / 8.1e12


def test_a_program_that_ends_with_the_step_that_is_priced() -> None:
    program = """\
import torch
model = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(8, 128, 256, device="cuda")
for _ in range(4):
    model(x).sum().backward()
    optimizer.step()
with torch.no_grad():
    model.eval()(x)  # by torch's fused layer
"""
    found = shardscale.rehearse(program, gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", 3)
    assert found.step_s
    assert "left out of it: evaluation" in repr(found)


CTC = """\
import torch
model = torch.nn.Linear(80, 29, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    log_probs = model(torch.ones(200, 8, 80, device="cuda")).log_softmax(-1)
    targets, lengths = torch.ones(8, 50, dtype=torch.int32), torch.full((8,), 50)
    {line}
    loss = torch.nn.CTCLoss(zero_infinity=True)(log_probs, targets, torch.full((8,), 200), lengths)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "of_cudnn"),
    [
        ("targets = targets.view(-1)", True),
        ("targets, lengths = targets.long().cuda(), lengths.cuda()", False),
        ("lengths = (targets.cuda() > 0).sum(1); targets = targets.long().view(-1).cuda()", False),
    ],
)
def test_ctc_loss_runs_without_cudnn(line: str, of_cudnn: bool) -> None:
    found = shardscale.rehearse(CTC.format(line=line), gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", 3)
    assert found.record["ranks"][0]["values"] == []
    said = "  CTC loss: run by torch's own kernels here; cuDNN's, which the null" in repr(found)
    assert said == of_cudnn
