"""A DeepSpeed file as a source of values: what is adopted, said, refused; and files as people
have them, reduced to their settings (tests/deepspeed_files, named after the project)."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.config.arguments import parse_run_config
from launcher.config.deepspeed_file import adopt, startup_lines
from launcher.config.deepspeed_file.reading import KINDS, read_file
from launcher.config.deepspeed_file.table import KEYS, RENAMED, SECTIONS
from launcher.config.resolve import resolve
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.strategies.offload_sizes import offload_sizes
from launcher.strategies.zero.config import build_config
from launcher.util.errors import UserError

FILES = sorted((Path(__file__).parents[2] / "deepspeed_files").glob("*.json"))
MOST_CHARACTERS = 300 - len("shardscale: ")

CPU = {"offload_optimizer": "cpu"}
ALL_CPU = {**CPU, "offload_param": "cpu"}
BF16 = {"precision": "bf16"}
# file -> what it sets besides defaults, or words of the refusal; on 2 ranks, or as many as given.
EXPECTED: dict[str, dict[str, Any] | tuple[str, ...]] = {
    "axolotl-zero1": {"zero": 1},
    "axolotl-zero2-compile": ('compile {"disable": false', "use --compile"),
    "axolotl-zero3": {"zero": 3},
    "axolotl-zero3-bf16": {"zero": 3, **BF16},
    "axolotl-zero3-bf16-cpuoffload-all": {"zero": 3, **BF16, **ALL_CPU},
    "axolotl-zero3-bf16-cpuoffload-params": {"zero": 3, **BF16, "offload_param": "cpu"},
    "axolotl-zero3-cpuoffload": {"zero": 3, **ALL_CPU},
    "deepspeed-zero1": {
        **{"zero": 1, "micro_batch": 4, "global_batch": 8, "lr": 1e-3, "weight_decay": 0.1},
        "precision": "fp32",  # its bf16.enabled is false
    },
    "deepspeedexamples-gpt2": ('warmup_type "log"', '"linear"', "= 128, but", "is 512"),
    "deepspeedexamples-llama-7b": ('warmup_type "log"', "4 x 4 accumulated"),
    "deepspeedexamples-neox-20b": ('warmup_type "log"', "1 x 8 accumulated"),
    "deepspeedexamples-nvme": ("global batch of 1 is", "2 ranks"),
    "deepspeedexamples-tensor-parallel": ('tensor_parallel {"autotp_size": 4}', "remove it"),
    "deepspeedexamples-zenflow": ("zero_optimization.zenflow", "losses differ, remove it"),
    "fastchat-lora-s2": {"zero": 2, **CPU},
    "fastchat-s2": {"zero": 2, **CPU},
    "fastchat-s3": {"zero": 3, **ALL_CPU},
    "hana-zero2": ('warmup_type "log"', '"linear"'),
    "llamafactory-z0": {"zero": 0},
    "llamafactory-z2-autotp": ('tensor_parallel {"autotp_size": 2}', "remove it"),
    "llamafactory-z2-offload": {"zero": 2, **CPU},
    "llamafactory-z3-alst": ("sequence_parallel", "remove it"),
    "llamafactory-z3-fp8": ("fp8", "--precision fp8 with --strategy fsdp"),
    "llamafactory-z3-partial-offload": {"zero": 3, **CPU, "pin_memory": False},
    "llamafactory-z3-quantized-gradients": ("zero_quantized_gradients", "losses differ"),
    "llava-zero3-offload": {"zero": 3, **BF16, **ALL_CPU},
    "megatron-onebit": ("prescale_gradients", '"OneBitAdam"', "Adam, AdamW or SGD"),
    "megatron-universal": {"zero": 3, **BF16, "micro_batch": 4, "global_batch": 16},
    "transformers-zero2": {"zero": 2, **CPU},
    "transformers-zero2-bfloat16": {"zero": 2, **CPU},
    "transformers-zero3": {"zero": 3, **ALL_CPU},
    "transformers-zero3-bfloat16": {"zero": 3, **ALL_CPU},
    "turbo-alignment-zero3": ("warmup_min_lr 0.1", 'warmup_type "log"'),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ds.json"


def parsed(path: Path, content: object, flags: str = "", ranks: int | None = 2) -> RunConfig:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse_run_config([f"--deepspeed={path}", *flags.split()], world_size=ranks)


def with_stage(content: dict[str, Any], stage: int = 2) -> dict[str, Any]:
    section = {"stage": stage, **content.get("zero_optimization", {})}
    return {**content, "zero_optimization": section}


def refusal(path: Path, content: object, flags: str = "") -> str:
    with pytest.raises(UserError) as caught:
        parsed(path, content, flags)
    text = str(caught.value)
    assert text.startswith("--deepspeed ")
    assert len(text) <= MOST_CHARACTERS
    assert text.isprintable(), "one line"
    return text


def changed(config: RunConfig) -> dict[str, Any]:
    default = RunConfig().flat()
    flat = config.flat()
    return {k: v for k, v in flat.items() if v != default.get(k) and k != "deepspeed"}


def test_there_are_files_of_many_projects() -> None:
    assert {file.stem for file in FILES} == set(EXPECTED)
    assert len({name.split("-")[0] for name in EXPECTED}) >= 5


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_as_people_have_them(file: Path) -> None:
    expected = EXPECTED[file.stem]
    argv = [f"--deepspeed={file}"]
    if isinstance(expected, tuple):
        with pytest.raises(UserError) as caught:
            parse_run_config(argv, world_size=2)
        assert [word for word in expected if word not in str(caught.value)] == []
        assert len(str(caught.value)) <= MOST_CHARACTERS
        return
    config = parse_run_config(argv, world_size=2)
    assert changed(config) == expected
    # What the run writes down and reads again is the same run.
    resolved = resolve(config, world_size=2, device_type="cuda")
    again = file.name and [f"--{k.replace('_', '-')}={v}" for k, v in expected.items() if v]
    again = ["--no-pin-memory" if flag == "--pin-memory=False" else flag for flag in again]
    assert parse_run_config([*argv, *again], world_size=2) == config
    handed = build_config(resolved, world_size=2)
    assert '"auto"' not in json.dumps(handed)
    # Everything that the table passes on is what DeepSpeed gets.
    for name, value in read_file(file).passed.get("zero_optimization", {}).items():
        if not isinstance(value, dict):
            assert handed["zero_optimization"][name] == value


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, {"micro_batch": 4}),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            {"micro_batch": 4, "global_batch": 24},
        ),
        ({"gradient_accumulation_steps": 3}, {"global_batch": 48}),
        ({"train_batch_size": 6}, {"micro_batch": 3, "global_batch": 6}),
        (
            {"train_batch_size": 12, "gradient_accumulation_steps": 3},
            {"micro_batch": 2, "global_batch": 12},
        ),
        ({"gradient_clipping": 0.5}, {"clip": 0.5}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
        ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"precision": "fp16"}),
        ({"bf16": {"enabled": False}}, {"precision": "fp32"}),  # on a GPU, too
        (
            {
                "bf16": {
                    "enabled": True,
                    "bf16_master_weights_and_grads": True,
                    "bf16_optimizer_states": True,
                },
                "data_types": {"grad_accum_dtype": "bf16"},
            },
            {"precision": "bf16-pure"},
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            {"precision": "bf16", "grad_accum_dtype": "bf16"},
        ),
        ({"optimizer": {"type": "Adam"}}, {}),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {"optimizer": "adam"}),
        ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, {}),
        (
            {
                "optimizer": {
                    "type": "SGD",
                    "params": {"lr": 1e-4, "momentum": 0.5, "weight_decay": 0, "nesterov": False},
                }
            },
            {"optimizer": "sgd", "lr": 1e-4, "momentum": 0.5, "weight_decay": 0.0},
        ),
        (
            {"optimizer": {"params": {"betas": [0.9, 0.999], "eps": 1e-6}}},
            {"betas": [0.9, 0.999], "eps": 1e-6},
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": {
                        "total_num_steps": 1e3,
                        "warmup_num_steps": 10,
                        "warmup_type": "linear",
                        "cos_min_ratio": 0.01,
                    },
                }
            },
            {"steps": 1000, "warmup_steps": 10, "min_lr_ratio": 0.01, "schedule": "cosine"},
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupLR",
                    "params": {
                        "warmup_max_lr": 0.01,
                        "warmup_num_steps": 10,
                        "warmup_type": "linear",
                    },
                }
            },
            {"lr": 0.01, "warmup_steps": 10, "min_lr_ratio": 1.0, "schedule": "constant"},
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {
                        "total_num_steps": 100,
                        "warmup_num_steps": 10,
                        "warmup_type": "linear",
                    },
                }
            },
            {"steps": 100, "warmup_steps": 10, "min_lr_ratio": 0.0, "schedule": "linear"},
        ),
        ({"zero_optimization": {"cpu_offload": True}}, {"offload_optimizer": "cpu"}),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_params": True}},
            {"zero": 3, "offload_param": "cpu"},
        ),
        (
            {
                "zero_optimization": {
                    "offload_optimizer": {
                        "device": "nvme",
                        "nvme_path": "/nvme",
                    }
                },
            },
            {
                "offload_optimizer": "nvme",
                "nvme_path": "/nvme",
            },
        ),
        ({"data_types": {"grad_accum_dtype": None}, "amp": {"enabled": False}}, {}),
        ({"compression_training": {"a": {"enabled": False}}, "sparse_gradients": False}, {}),
        ({"sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1}}, {}),
        ({"_comment": ["anything"], "elasticity": {"enabled": False, "version": 0.1}}, {}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_file_says_is_adopted(
    content: dict[str, Any], expected: dict[str, Any], path: Path
) -> None:
    assert changed(parsed(path, with_stage(content))) == {"zero": 2, **expected}


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4},
            "--micro-batch 8",
            ("is 4, but --micro-batch is 8",),
        ),
        ({"train_micro_batch_size_per_gpu": 1}, "--micro-batch auto", ("--micro-batch is auto",)),
        ({"train_batch_size": 64}, "--global-batch 32", ("is 64, but --global-batch is 32",)),
        (
            {"gradient_accumulation_steps": 2},
            "--micro-batch 8 --global-batch 16",
            ("micro-batch 8 x 2 accumulated x 2 ranks = 32, but the global batch is 16",),
        ),
        ({"train_batch_size": 7}, "", ("global batch of 7", "2 ranks")),
        ({"gradient_clipping": 0.5}, "--clip 1", ("gradient_clipping is 0.5, but --clip is 1.0",)),
        ({"bf16": {"enabled": True}}, "--precision fp32", ("bf16.enabled is true", "is fp32")),
        ({"bfloat16": {"enabled": True}}, "--precision fp32", ("bfloat16.enabled is true",)),
        ({"bf16": {"enabled": False}}, "--precision bf16", ("bf16.enabled is false", "is bf16")),
        ({"fp16": {"enabled": False}}, "--precision fp16", ("fp16.enabled is false", "is fp16")),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "", ("keep one",)),
        ({"optimizer": {"params": {"lr": 0.5}}}, "--lr 1e-3", ("lr is 0.5, but --lr is 0.001",)),
        (
            {"optimizer": {"type": "Adam"}},
            "--optimizer adam",
            ('"Adam" (decaying as AdamW)', "--optimizer is adam"),
        ),
        (
            {"optimizer": {"params": {"betas": [0.9, 0.999]}}},
            "--betas 0.9 0.95",
            ("betas is [0.9, 0.999], but --betas is 0.9 0.95",),
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}},
            "--epochs 2",
            ("total_num_steps is 9, but --epochs is 2.0",),
        ),
        ({"zero_optimization": {"stage": 3}}, "--zero 2", ("stage is 3, but --zero is 2",)),
        ({}, "--strategy fsdp", ("needs --strategy zero, not fsdp",)),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "--offload-optimizer none",
            ('cpu_offload is "cpu", but --offload-optimizer is none',),
        ),
        ({"optimizer": {"type": "Lamb"}}, "", ('"Lamb"', "Adam, AdamW or SGD")),
        (
            {"optimizer": {"type": "ZeroOneAdam", "params": {"var_freeze_step": 1}}},
            "",
            ("ZeroOne",),
        ),
        ({"scheduler": {"type": "Banana", "params": {"x": 1}}}, "", ('"Banana"', "WarmupLR")),
        (
            {
                "optimizer": {"params": {"lr": 0.1}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}},
            },
            "",
            ("optimizer.params.lr 0.1 and scheduler.params.warmup_max_lr 0.2 differ",),
        ),
        ({"optimizer": {"params": {"bias_correction": False}}}, "", ("set it to true",)),
        ({"optimizer": {"params": {"amsgrad": True}}}, "", ("amsgrad true: set it to false",)),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "", ("never fills",)),
        (
            {"zero_optimization": {"stgae": 2}},
            "",
            ("unknown key zero_optimization.stgae", "stage?"),
        ),
        ({"gradient_clip": 1}, "", ("unknown key gradient_clip", "gradient_clipping?")),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 1, "max_live_parameters": 2}},
            "",
            ("max_live_parameters", "differ: remove one"),
        ),
        ({"zero_optimization": {"mics_shard_size": 8}}, "", ("fsdp --replicate",)),
        ({"data_efficiency": {"enabled": True}}, "", ("data_efficiency", "batches are")),
        ({"random_ltd": {"random_ltd_enabled": True}}, "", ("random_ltd",)),
        ({"compile": {"deepcompile": True}}, "", ("deepcompile", "--compile")),
        ({"pipeline": {"stages": 2}}, "", ("pipeline",)),
        ({"hybrid_engine": {"enabled": True}}, "", ("hybrid_engine",)),
        ({"sequence_parallel_size": 2}, "", ("sequence_parallel_size 2",)),
        ({"communication_data_type": "bf16"}, "", ("communication_data_type", "fp32")),
        ({"amp": {"enabled": True}}, "", ('write "bf16"',)),
    ],
)
def test_what_contradicts_is_refused_by_name(
    content: dict[str, Any], flags: str, words: tuple[str, ...], path: Path
) -> None:
    text = refusal(path, with_stage(content), flags)
    assert [word for word in words if word not in text] == []


def test_a_config_file_counts_like_flags(path: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("lr: 0.25\nbetas: [0.5, 0.75]\n")
    content = with_stage({"optimizer": {"params": {"lr": 0.5, "betas": [0.5, 0.75]}}})
    assert "lr is 0.5, but --lr is 0.25" in refusal(path, content, f"--config {tmp_path}/run.yaml")


@pytest.mark.parametrize("section", [{}, {"stage": "auto"}, {"reduce_bucket_size": 1000}])
def test_a_file_without_a_stage_leaves_it_to_the_flag(section: dict[str, Any], path: Path) -> None:
    assert "give --zero too" in refusal(path, {"zero_optimization": section})
    config = parsed(path, {"zero_optimization": section}, "--zero 2 --offload-optimizer cpu")
    assert (config.sharding.zero, config.sharding.offload_optimizer) == (2, "cpu")


def test_all_conflicts_are_told_at_once(path: Path) -> None:
    params = {"lr": 0.5, "eps": 0.5, "weight_decay": 0.5, "betas": [0.5, 0.5], "momentum": 0.5}
    content = with_stage({"optimizer": {"params": params}, "gradient_clipping": 0.5})
    flags = "--lr 1 --eps 1 --weight-decay 1 --momentum 0 --betas 0 0 --clip 1"
    text = refusal(path, content, flags)
    told = text.count(", but --")
    assert told >= 3
    assert text.endswith(f"; and {6 - told} more")


def test_the_world_size_may_stay_open(path: Path) -> None:
    content = with_stage({"train_batch_size": 6, "gradient_accumulation_steps": 3})
    config = parsed(path, content, ranks=None)
    assert (config.data.micro_batch, config.data.global_batch) == (8, 6)
    assert isinstance(
        parsed(path, {}, "--zero 2 --micro-batch auto").data.micro_batch, AutoMicroBatch
    )


def test_fp16_scales_as_the_file_says(path: Path) -> None:
    scale = {"initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 4}
    content = with_stage({"fp16": {"enabled": "auto", "loss_scale": 0, **scale}})
    for flags in ("--precision fp16", "--precision bf16"):
        config = parsed(path, content, flags)
        resolved = resolve(config, world_size=2, device_type="cuda")
        handed = build_config(resolved, world_size=2)
        expected = {"enabled": True, "loss_scale": 0, **scale} if "fp16" in flags else None
        assert handed.get("fp16") == expected


def test_buffers_of_nvme_stay_sized_to_the_model(path: Path) -> None:
    buffers = {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 9}
    section = {"sub_group_size": 0, "offload_optimizer": buffers}
    config = parsed(path, with_stage({"zero_optimization": section}, 3))
    flags = "--zero 3 --offload-optimizer nvme --nvme-path /nvme"
    handed = []
    for each in (config, parse_run_config(flags.split())):
        resolved = resolve(each, world_size=2, device_type="cuda")
        handed.append(build_config(resolved, world_size=2))
    assert handed[0] == handed[1]
    assert "buffer_count (sized to the model)" in "".join(startup_lines(path))
    section["sub_group_size"] = 300000
    config = parsed(path, with_stage({"zero_optimization": section}, 3))
    resolved = resolve(config, world_size=2, device_type="cuda")
    grouped = build_config(resolved, world_size=2)
    assert grouped["zero_optimization"]["sub_group_size"] == 300000
    smaller = offload_sizes(resolved.config, resolved.model, 2).locked_bytes
    assert smaller < offload_sizes(each, resolved.model, 2).locked_bytes


def test_io_of_nvme_is_passed_on(path: Path) -> None:
    buffers = {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True}
    aio = {"block_size": 262144, "thread_count": 2, "queue_depth": 8}
    content = {"zero_optimization": {"offload_optimizer": buffers}, "aio": aio}
    config = parsed(path, with_stage(content, 3))
    handed = build_config(resolve(config, world_size=2, device_type="cuda"), world_size=2)
    assert (
        handed["aio"] | {"block_size": 262144, "intra_op_parallelism": 2, "queue_depth": 8}
        == (handed["aio"])
    )
    moved = handed["zero_optimization"]["offload_optimizer"]
    assert (moved["pipeline_read"], moved["buffer_count"]) == (True, 12)


def test_what_runs_is_said(path: Path) -> None:
    parsed(
        path,
        with_stage(
            {
                "bfloat16": {"enabled": True},
                "steps_per_print": 10,
                "activation_checkpointing": {"cpu_checkpointing": True},
                "zero_optimization": {"max_live_parameters": 0},
            }
        ),
    )
    text = "\n".join(startup_lines(path))
    for words in (
        "--precision bf16",
        "--zero 2",
        "bfloat16.enabled is bf16.enabled",
        "max_live_parameters is stage3_max_live_parameters",
        "steps_per_print (--log-every)",
        "activation_checkpointing (use --activation-checkpointing)",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ("not valid JSON", "line 1 column 2")),
        ('{"a": 1, // no\n "b": 2}', ("comments are not JSON",)),
        ("\ufeff{}", ("not valid JSON", "BOM")),
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', ('"stage" is given twice',)),
        ('{"gradient_clipping": NaN}', ("gradient_clipping is nan", "no JSON number")),
        ('{"gradient_clipping": -Infinity}', ("gradient_clipping is -inf", "no JSON number")),
        ('{"gradient_clipping": 1e400}', ("gradient_clipping is inf", "no JSON number")),
        (
            '{"gradient_clipping": ' + "9" * 5000 + "}",
            ("gradient_clipping is 9999999999..., of 5,000 digits",),
        ),
        ("[" * 100_000, ("nested too deep",)),
        ('{"pipeline": ' + "[" * 500 + "]" * 500 + "}", ("nested too deep",)),
        ("[1]", ("holds [1]", "JSON object")),
        ("{}" + " " * (1 << 20), ("larger than 1,048,576 bytes",)),
        ('{"\\u0000\\n": 1}', ("unknown key \\u0000\\n",)),
        ('{"' + "k" * 10_000 + '": 1}', ("unknown key kkk",)),
        ('{"zero_optimization": true}', ("zero_optimization is true", "JSON object")),
        ('{"zero_optimization": {"stage": 2.0}}', ("stage is 2.0", "0, 1, 2 or 3")),
        ('{"zero_optimization": {"reduce_bucket_size": {}}}', ("reduce_bucket_size is {}",)),
        (
            '{"zero_optimization": {"offload_param": {"nvme_path": 5}}}',
            ("offload_param.nvme_path is 5, but must be text",),
        ),
    ],
    ids=range(18),
)
def test_what_is_no_deepspeed_file(content: str, words: tuple[str, ...], path: Path) -> None:
    text = refusal(path, content, "--zero 2" if "stage" not in content else "")
    assert [word for word in words if word not in text] == []


def test_special_files_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("fifo", "loop", "x" * 300, "missing", "."):
        with pytest.raises(UserError, match="--deepspeed") as caught:
            parse_run_config([f"--deepspeed={tmp_path / name}"])
        assert len(str(caught.value)) <= MOST_CHARACTERS


EXTREMES: tuple[Any, ...] = (
    *(-1, 0, 1, 2.5, 2**31, 2**63, 10**299, 1e30, 1e308, True, False),
    *("", "text", "x" * 5000, [], [1], [1, 2, 3], ["a", "b"], {}, {"a": {"b": 1}}, "\u0663"),
)


@pytest.mark.parametrize("name", sorted({*KEYS, *SECTIONS, *RENAMED}))
def test_extremes_of_every_key_are_taken_or_refused_in_one_sentence(name: str, path: Path) -> None:
    taken = []
    config = RunConfig().replace(deepspeed=path)
    for value in EXTREMES:
        content: Any = value
        for part in reversed(name.split(".")):
            content = {part: content}
        content.setdefault("zero_optimization", {})
        if isinstance(content["zero_optimization"], dict):
            content["zero_optimization"].setdefault("stage", 2)
        path.write_text(json.dumps(content))
        text = ""
        try:
            adopt(config, (), 2)
            taken.append(value)
        except UserError as error:
            text = str(error)
        assert len(text) <= MOST_CHARACTERS
        assert text.isprintable()
    place = RENAMED.get(name, name)
    if place in KEYS and KEYS[place].kind not in ("any", "text"):
        assert "x" * 5000 not in taken
        fits = KINDS[KEYS[place].kind][0]
        flags = (True, False) if name != place else ()  # cpu_offload is a device today
        assert [value for value in taken if not fits(value) and value not in flags] == []


def test_every_key_of_the_installed_deepspeed_is_known() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import config, precision_config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config

    classes = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "bf16": precision_config.DeepSpeedBF16Config,
        "fp16": precision_config.DeepSpeedFP16Config,
    }
    known = {*KEYS, *RENAMED, *SECTIONS}
    theirs = {
        f"{section}.{name}"
        for section, its in classes.items()
        for field, info in its.model_fields.items()
        for name in {field, info.alias or field}
    }
    theirs |= {f"aio.{name}" for name in AIO_DEFAULT_DICT}
    theirs |= set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    theirs |= {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    assert theirs - known == set()
