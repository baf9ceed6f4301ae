"""Our own DeepSpeed files: plain, complete, and working with and without shardscale.

Runs that only have to work are forked off one process that has imported everything once; one of
our own files goes through the real torchrun.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from harness import train

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.config.sharding import Offload, ShardingChoice
from launcher.model.sizes import NAMED
from launcher.strategies.parameters import parameters_of
from launcher.strategies.zero.config import build_config

DS_CONFIGS = Path(__file__).parents[3] / "ds_configs"
OURS = sorted(DS_CONFIGS.glob("*.json"))
EXPECTED: dict[str, tuple[Literal[0, 1, 2, 3], Offload, Offload]] = {
    "zero0": (0, "none", "none"),
    "zero1": (1, "none", "none"),
    "zero2": (2, "none", "none"),
    "zero3": (3, "none", "none"),
    "zero1_offload_optimizer": (1, "cpu", "none"),
    "zero2_offload_optimizer": (2, "cpu", "none"),
    "zero3_offload_optimizer": (3, "cpu", "none"),
    "zero3_offload": (3, "cpu", "cpu"),
}

TINY = [
    *("--data", "text.txt", "--tokenizer", "byte", "--vocab-size", "257"),
    *("--layers", "1", "--heads", "2", "--d-model", "16", "--context", "16"),
    *("--micro-batch", "8", "--steps", "2", "--device", "cpu", "--report-to=none"),
]

FORK_PER_RUN = """
import json, os, sys, traceback
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, torch
import launcher.train
torch.compile(len)  # imports, once for all, what each run would import on its way

for argv in json.load(sys.stdin):
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os.dup2(2, 1)
        try:
            launcher.train.main(argv)
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(99)
    print("code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

PLAIN_DEEPSPEED = """
import json, os, socket, sys
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1")
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
import deepspeed, deepspeed.ops, torch
# An optional kernel that would be compiled, which takes a compiler and half a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
for path in sys.argv[1:]:
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=path)
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(8, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print("result", json.dumps([engine.zero_optimization_stage(), *losses]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("name", NAMED)
def test_stage_3_keeps_vectors_whole_and_shards_matrices(name: str) -> None:
    run = resolve(RunConfig().replace(model=name, zero=3), world_size=8, device_type="cuda")
    section = build_config(run, world_size=8)["zero_optimization"]
    most = section["stage3_param_persistence_threshold"]
    for parameter in parameters_of(run.model):
        assert (parameter.elements <= most) == (len(parameter.shape) == 1), parameter
    if name.startswith("gpt2"):
        assert most == 4 * run.model.d_model  # the bias of the MLP's first projection


def test_stage_3_shards_all_of_a_decoder_without_vectors() -> None:
    """OLMo's norms have no weights."""
    run = resolve(RunConfig().replace(model="olmo-1b", zero=3), world_size=2, device_type="cpu")
    section = build_config(run, world_size=2)["zero_optimization"]
    assert section["stage3_param_persistence_threshold"] == 0


def test_stage_3_gathers_an_mlp_once_for_all_its_tiles() -> None:
    """Matrices further apart than the reuse distance are released between their uses."""
    config = RunConfig().replace(zero=3, mlp_tile=64)
    run = resolve(config, world_size=2, device_type="cpu")
    distance = build_config(run, world_size=2)["zero_optimization"]["stage3_max_reuse_distance"]
    assert distance > run.model.d_model * run.model.ffn_dim


def resolved(path: Path, world_size: int = 1, **changes: Any) -> Resolved:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in changes.items()]
    config = parse_run_config([f"--deepspeed={path}", *flags], world_size=world_size)
    return resolve(config, world_size=world_size, device_type="cpu")


def handed_over(path: Path, world_size: int = 1, **changes: Any) -> dict[str, Any]:
    """Return the config that DeepSpeed gets."""
    return build_config(resolved(path, world_size, **changes), world_size=world_size)


def has_auto(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(has_auto, value.values()))
    return value == "auto"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    lines = (f"Paragraph {n} says little about {n * 7 % 13}.\n\n" for n in range(600))
    (tmp_path / "text.txt").write_text("".join(lines))
    return tmp_path


def last_loss(run: Path) -> float:
    records = [json.loads(line) for line in (run / "rank0.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2]
    return float(steps[-1]["loss"])


def test_there_is_a_file_for_each_choice() -> None:
    assert {path.stem for path in OURS} == set(EXPECTED)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_our_files_are_plain_and_complete(path: Path) -> None:
    content = json.loads(path.read_text())
    assert content["train_micro_batch_size_per_gpu"] == RunConfig().data.micro_batch
    assert content["gradient_accumulation_steps"] == 1
    assert content["gradient_clipping"] == RunConfig().optim.clip
    assert not {"optimizer", "scheduler"} & set(content), "the program brings its own"
    assert not has_auto(content), "plain DeepSpeed does not know auto"
    assert resolved(path, 2).config.sharding == ShardingChoice(
        strategy="zero",
        zero=EXPECTED[path.stem][0],
        offload_optimizer=EXPECTED[path.stem][1],
        offload_param=EXPECTED[path.stem][2],
        deepspeed=path,
    )
    ours = handed_over(path, 2)["zero_optimization"]
    said = {k: v for k, v in content["zero_optimization"].items() if not isinstance(v, dict)}
    said.pop("stage3_gather_16bit_weights_on_model_save", None)  # checkpoints are our own
    assert {key: ours[key] for key in said} == said


def test_our_files_work_with_plain_deepspeed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_DEEPSPEED, *map(str, OURS)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = [
        json.loads(line.removeprefix("result "))
        for line in done.stdout.splitlines()
        if line.startswith("result ")
    ]
    assert [result[0] for result in results] == [EXPECTED[path.stem][0] for path in OURS]
    for _, *losses in results:
        assert losses == pytest.approx(results[0][1:], rel=1e-5)
        assert losses[2] < losses[1] < losses[0]


def test_our_files_train_alike(text: Path) -> None:
    ours = [path for path in OURS if path.stem in ("zero0", "zero2", "zero3_offload_optimizer")]
    files = {path.stem: path for path in ours}
    runs = [
        [*TINY, "--deepspeed", str(path), "--out", str(text / f"run-{name}")]
        for name, path in files.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", FORK_PER_RUN],
        input=json.dumps(runs),
        cwd=text,
        env={**os.environ, "SHARDSCALE_CACHE": str(text / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split("\n") == ["code 0"] * len(files) + [""], done.stderr
    losses = {name: last_loss(text / f"run-{name}") for name in files}
    assert losses == pytest.approx(dict.fromkeys(files, losses["zero0"]), rel=1e-4)


def test_our_file_on_two_ranks(text: Path) -> None:
    command = [*TINY, "--data", str(text / "text.txt"), "--out", str(text / "run")]
    command += ["--deepspeed", str(DS_CONFIGS / "zero3_offload.json")]
    done = train(2, *command, SHARDSCALE_CACHE=str(text / "cache"))
    assert done.returncode == 0, done.stderr
    assert json.loads((text / "run/status.json").read_text())["state"] == "completed"
    assert last_loss(text / "run") < 6.0
