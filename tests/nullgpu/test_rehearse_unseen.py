"""Lines of a report on what the rehearsed steps have not shown."""

import sys
from pathlib import Path

import pytest
from nullgpu.test_rehearse_programs import TORCHRUN

import shardscale
from launcher.forecast.machine import Machine
from launcher.measure.hardware import CONTEXT_BYTES, NCCL_GROUP_BYTES

pytestmark = pytest.mark.usefixtures("in_a_folder")

LOOP = """\
import torch
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
for step in range({steps}):
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_program_of_one_step_has_not_run_a_backward_beside_its_states(optimizer: str) -> None:
    report = repr(shardscale.rehearse(LOOP.format(optimizer=optimizer, steps=1), gpu="T4"))
    assert "  the program ended by itself after 1 step\n" in report
    assert ("    a second step would need more" in report) == (optimizer == "AdamW")


def test_one_step_that_is_asked_for_takes_two() -> None:
    found = shardscale.rehearse(LOOP.format(optimizer="AdamW", steps=9), gpu="T4", steps=1)
    assert found.record["steps"] == 2
    assert "  not in it: an evaluation or a save after the first 2 steps" in repr(found)
    assert "by itself" not in repr(found)


PATIENT = """\
import torch
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM
from transformers import Trainer, TrainingArguments
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
rows = [dict(input_ids=[5] * 8, labels=[5] * 8)] * 8
every = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
best = dict(load_best_model_at_end=True, metric_for_best_model="eval_loss")
arguments = TrainingArguments("out", max_steps=20, report_to=[], **every, **best)
callbacks = [EarlyStoppingCallback(1)]
Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks).train()
"""


def test_early_stopping_does_not_end_a_program_whose_losses_are_unknown() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found = shardscale.rehearse(PATIENT, gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", 3)
    assert "by itself" not in repr(found)


RARELY = """\
import torch
critic, generator = (torch.nn.Linear(1024, 1024, device="cuda") for _ in range(2))
often, rarely = (torch.optim.Adam(one.parameters()) for one in (critic, generator))
inputs = torch.ones(8, 1024, device="cuda")
for step in range(40):
    critic(generator(inputs).detach()).sum().backward()
    often.step()
    if step % {every} == 4:
        critic(generator(inputs)).sum().backward()
        rarely.step()
"""


def test_an_optimizer_that_steps_rarely() -> None:
    found = shardscale.rehearse(RARELY.format(every=5), gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", 8)
    states = found.record["ranks"][0]["end"]["by_category"]["optimizer"]
    assert states == pytest.approx(2 * 8 * 1024 * 1024, rel=0.01)


def test_an_optimizer_that_has_not_stepped() -> None:
    found = shardscale.rehearse(RARELY.format(every=99).replace("== 4", "== 98"), gpu="T4")
    assert found.record["steps"] == 15
    line = "  not in it: the states of an optimizer that has not stepped: Adam of 1,049,600"
    assert line in repr(found)


STAGES = """\
import torch
def train(size, steps):
    model = torch.nn.Linear(size, size, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        model(torch.ones(8, size, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
for size, steps in {stages}:
    train(size, steps)
"""


@pytest.mark.parametrize(
    ("stages", "steps"), [([(64, 3), (1024, 9)], 5), ([(64, 2), (128, 2), (1024, 9)], 6)]
)
def test_each_stage_of_a_training_has_a_step_beside_its_states(
    stages: list[tuple[int, int]], steps: int
) -> None:
    found = shardscale.rehearse(STAGES.format(stages=stages), gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", steps)
    states = found.record["ranks"][0]["end"]["by_category"]["optimizer"]
    assert states == pytest.approx(2 * 4 * 1024 * 1024, rel=0.01)
    assert found.step_s


def test_a_stage_of_the_same_model_and_another_optimizer() -> None:
    program = """\
import torch
model = torch.nn.Linear(1024, 1024, device="cuda")
for steps, kind in ((3, torch.optim.SGD), (9, torch.optim.Adam)):
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.ones(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
"""
    found = shardscale.rehearse(program, gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", 5)
    states = found.record["ranks"][0]["end"]["by_category"]["optimizer"]
    assert states == pytest.approx(2 * 4 * 1024 * 1024, rel=0.01)
    assert found.step_s


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_networks_run_without_cudnn(kind: str) -> None:
    loop = LOOP.format(optimizer="SGD", steps=9)
    loop = loop.replace("Linear(1024", f"{kind}(1024").replace(").sum()", ")[0].sum()")
    found = shardscale.rehearse(loop, gpu="T4")
    assert (found.verdict, found.record["steps"], found.step_s) == ("fits", 3, None)
    assert f"  {kind}: run by torch's own kernels here; cuDNN's, which the null" in repr(found)
    assert "no seconds: torch's own kernels for recurrent networks take far longer" in repr(found)


PARTS = """\
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(1024, 512), torch.nn.Linear(512, 1024)
model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model.decoder(model.encoder(torch.ones(8, 1024, device="cuda"))).sum().backward()
    optimizer.step()
"""


def test_a_model_whose_parts_are_called_alone() -> None:
    found = shardscale.rehearse(PARTS, gpu="T4")
    assert f": Model, {2 * 1024 * 512 + 1024 + 512:,} parameters, 1 rank" in repr(found)
    modules = found.record["ranks"][0]["peak"]["by_module"]
    assert {"encoder", "decoder"} <= set(modules)


TEACHER = """\
import torch
teacher, model = (torch.nn.Linear(size, 4096, device="cuda") for size in (4096, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.ones(4096, 4096, device="cuda")
for step in range(9):
    with torch.no_grad():
        wanted = {call}
    (model(inputs[:, :64]) - wanted).square().mean().backward()
    optimizer.step()
"""


def test_the_seconds_of_a_step_are_also_its_teachers() -> None:
    with_it, without = (
        shardscale.rehearse(TEACHER.format(call=call), gpu="T4")
        for call in ("teacher(inputs)", "inputs")
    )
    seconds = [one.record["ranks"][0]["seconds"]["products_s"] for one in (with_it, without)]
    flops = 2 * 4096**3
    rate = Machine.of_gpu("T4", ranks_per_node=1).matmul_flops_per_s["fp32"]
    assert seconds[0] - seconds[1] == pytest.approx(flops / rate, rel=0.1)
    assert "left out of it" not in repr(with_it)
    assert ": Linear, 266,240 parameters" in repr(with_it)


RANKS_AGREE = """\
import torch, torch.distributed as dist
from lightning.pytorch.strategies.parallel import ParallelStrategy
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    agreed = [ParallelStrategy().reduce_boolean_decision(dist.get_rank() >= least)
              for least in range(3)]
    print("agreed", agreed, flush=True)
"""
STRATEGY = """\
import torch
class ParallelStrategy:
    def reduce_boolean_decision(self, decision):
        decision = torch.tensor(int(decision), device="cuda")
        torch.distributed.all_reduce(decision)
        return bool(decision == 2)
"""


def test_ranks_of_lightning_agree(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "lightning" / "pytorch" / "strategies"
    folder.mkdir(parents=True)
    (folder / "parallel.py").write_text(STRATEGY)
    found = shardscale.rehearse(RANKS_AGREE, gpu="T4", command=(sys.executable, *TORCHRUN))
    assert (found.verdict, found.record["ranks"][0]["values"]) == ("fits", [])
    assert capfd.readouterr().err.count(" [True, False, False]") == 8


LIBRARY = """\
import linecache, torch
source = "def check(one):\\n    return bool(one.isfinite())\\n"
file = torch.__path__[0] + "extra/check.py"  # as torchao's lie beside torch's
linecache.cache[file] = (len(source), None, source.splitlines(True), file)
names = {}
exec(compile(source, file, "exec"), names)
print("checked", names["check"](torch.ones(4, device="cuda").sum()))
"""


def test_a_library_whose_name_begins_with_torch_is_not_torch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = shardscale.rehearse([LIBRARY, LOOP.format(optimizer="SGD", steps=9)], gpu="T4")
    assert "checked True" in capfd.readouterr().err
    (read,) = found.record["ranks"][0]["values"]
    assert read["library"].endswith("torchextra/check.py:2")


OF_A_LIBRARY = """\
import torch
class Scaled(torch.Tensor):
    @staticmethod
    def __new__(cls, inner, scale):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device)
    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale
    def __tensor_flatten__(self):
        return ["inner", *(["scale"] if self.scale else [])], None
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = torch.utils._pytree.tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        found = func(*inner[0], **inner[1])
        same = func is torch.ops.aten.detach.default
        return cls(found, args[0].scale) if same else found
model = torch.nn.Linear(64, 64, device="cuda")
weight = Scaled(model.weight.detach(), torch.ones(1, device="cuda") * 2)
model.weight = torch.nn.Parameter(weight, requires_grad=False)
optimizer = torch.optim.SGD([model.bias], lr=0.1)
for step in range(9):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_what_the_observer_asks_a_tensor_is_no_read_of_the_program() -> None:
    found = shardscale.rehearse(OF_A_LIBRARY, gpu="T4")
    assert (found.verdict, found.record["ranks"][0]["values"]) == ("fits", []), repr(found)


@pytest.mark.parametrize(
    "line",
    [
        "matmul.fp32_precision = 'tf32'",
        "matmul.allow_tf32 = True",
        "matmul.fp32_precision = 'ieee'",
    ],
)
def test_tf32_is_seen_however_it_is_set(line: str) -> None:
    loop = LOOP.format(optimizer="SGD", steps=9).replace("ones(8,", "ones(8192,")
    found = shardscale.rehearse([f"import torch; torch.backends.cuda.{line}", loop], gpu="H100")
    machine = Machine.of_gpu("H100", ranks_per_node=1)
    rate = machine.matmul_flops_per_s["fp32" if "ieee" in line else "tf32"]
    flops = 2 * 2 * 8192 * 1024 * 1024  # no gradient of the inputs
    seconds = found.record["ranks"][0]["seconds"]["products_s"]
    assert seconds == pytest.approx(flops / rate, rel=0.6)  # of small matrices


@pytest.mark.parametrize(("line", "type_"), [("", "tf32"), ("allow_tf32 = False", "fp32")])
def test_convolutions_are_in_tf32_unless_a_program_says_otherwise(line: str, type_: str) -> None:
    loop = LOOP.format(optimizer="SGD", steps=9).replace("ones(8, 1024", "ones(64, 256, 64, 64")
    loop = loop.replace("Linear(1024, 1024", "Conv2d(256, 256, 3, padding=1")
    set_ = f"torch.backends.cudnn.{line}" if line else ""
    found = shardscale.rehearse(["import torch", set_, loop], gpu="A100-80GB")
    rate = Machine.of_gpu("A100-80GB", ranks_per_node=1).matmul_flops_per_s[type_]
    flops = 2 * 2 * 64 * 64 * 64 * 256 * 256 * 9  # no gradient of the inputs
    seconds = found.record["ranks"][0]["seconds"]["products_s"]
    assert seconds == pytest.approx(flops / rate, rel=0.3)


HISTORY = """\
import torch
model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
optimizer = torch.optim.LBFGS(model.parameters(), history_size=50)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(8, 1024, device="cuda")).square().mean()
    loss.backward()
    return loss
for step in range(9):
    optimizer.step(closure)
"""


def test_the_history_of_lbfgs_that_is_not_there_yet() -> None:
    report = repr(shardscale.rehearse(HISTORY, gpu="T4"))
    # each of 4 MiB
    assert "all 50 pairs of vectors that LBFGS will keep, 400.0MiB, of which it has 0" in report


def test_a_checkpoint_that_is_loaded_is_no_part_of_a_step() -> None:
    loop = "import torch.distributed.checkpoint as dcp\n" + LOOP.format(optimizer="SGD", steps=9)
    saved = "if step == 0: dcp.save(model.state_dict(), checkpoint_id='saved')"
    loaded = "dcp.load(model.state_dict(), checkpoint_id='saved')"
    found = shardscale.rehearse(f"{loop}    {saved}\n    {loaded}\n", gpu="T4")
    assert "    left out of it: checkpoint, which followed the step" in repr(found)


def test_a_weight_that_is_computed_is_no_evaluation() -> None:
    first, _, *loop = LOOP.format(optimizer="SGD", steps=9).splitlines(keepends=True)
    norm = "torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1024, 1024)).cuda()"
    made = f"model = {norm}\nwith torch.no_grad(): model.weight\n"
    report = repr(shardscale.rehearse("".join((first, made, *loop)), gpu="T4"))
    assert "  not in it: an evaluation or a save after the first 3 steps" in report


ON_THE_FIRST_GPU = """\
import os, torch
def train(rank):
    torch.cuda.set_device({device})
    where = "file://" + os.path.abspath("rendezvous")
    torch.distributed.init_process_group("{backend}", where, rank=rank, world_size=2)
    {rank}
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    {parent}
    torch.multiprocessing.spawn(train, nprocs=2)
"""


def test_ranks_that_share_a_gpu_by_gloo_take_it_together() -> None:
    lines = {"rank": "pass", "parent": "pass", "device": 0, "backend": "gloo"}
    found = shardscale.rehearse(ON_THE_FIRST_GPU.format(**lines), gpu="T4", gpus=2)
    held = sum(rank["reserved_peak_bytes"] for rank in found.record["ranks"])
    (card,) = [card for card in found.record["cards"] if card["gpu"] == "T4"]
    assert card["used_bytes"] == held + 2 * CONTEXT_BYTES + NCCL_GROUP_BYTES


@pytest.mark.parametrize("where", ["rank", "parent"])
def test_what_other_processes_take_of_a_ranks_gpu_is_used(where: str) -> None:
    lines = {"rank": "pass", "parent": "pass", "device": "rank", "backend": "nccl"}
    lines[where] = 'large = torch.ones(1 << 28, device="cuda:0")'
    found = shardscale.rehearse(ON_THE_FIRST_GPU.format(**lines), gpu="T4", gpus=2)
    first = found.record["ranks"][0]["reserved_peak_bytes"]
    outside = 2 * CONTEXT_BYTES + NCCL_GROUP_BYTES
    (card,) = [card for card in found.record["cards"] if card["gpu"] == "T4"]
    assert card["used_bytes"] == pytest.approx(first + (1 << 30) + outside, abs=4 << 20)
    assert "  on rank 0's GPU other processes of the program take 1.51GiB" in repr(found)
