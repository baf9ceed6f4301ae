"""`plan --from`: bytes of a trainer that shardscale's own engine would not hold."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.model.foreign.config import ForeignConfig
from launcher.strategies.fsdp import grouping
from launcher.tools.plan_from.assess import Planned, plan_of
from launcher.tools.plan_from.changes import _edits
from launcher.tools.plan_from.output import verdict_line
from launcher.tools.plan_from.reading import read_source

ARGUMENTS: dict[str, Any] = {
    "output_dir": "out",
    "model_name_or_path": "HuggingFaceTB/SmolLM2-135M",
    "dtype": "float32",
    "block_size": 256,
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-5,
}
SHARDED = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
"""


def plan(folder: Path, *others: str, **more: Any) -> Planned:
    """Plan a run of transformers' Trainer on two H100."""
    (folder / "args.json").write_text(json.dumps({**ARGUMENTS, **more}))
    sources = [read_source(folder / name) for name in (*others, "args.json")]
    return plan_of(sources, ["--gpu", "H100", "--gpus", "2", "--no-calibration"])


def test_blocks_are_those_of_transformers(tmp_path: Path) -> None:
    planned = plan(tmp_path)
    assert isinstance(planned.assessment.run.model, ForeignConfig)
    assert "norms composed of operators" not in planned.corrections
    # torch.compile fuses what transformers' code composes.
    compiled = plan(tmp_path, torch_compile=True).assessment.run.model
    assert not isinstance(compiled, ForeignConfig)


def test_flash_attn_keeps_what_sdpa_keeps_but_for_windows(tmp_path: Path) -> None:
    plans = [plan(tmp_path, attn_implementation=name) for name in ("sdpa", "flash_attention_2")]
    assert isinstance(plans[1].assessment.run.model, ForeignConfig)
    assert plans[0].allocated_bytes == plans[1].allocated_bytes
    # sdpa would make a mask of a window
    more = {"attn_implementation": "flash_attention_2", "dtype": "bfloat16"}
    for length, foreign in ((4095, True), (4096, False)):
        planned = plan(
            tmp_path, model_name_or_path="mistralai/Mistral-7B-v0.1", block_size=length, **more
        )
        assert isinstance(planned.assessment.run.model, ForeignConfig) is foreign


def test_tensor_parallelism_of_transformers_gathers_logits(tmp_path: Path) -> None:
    section = "parallelism_config:\n  parallelism_config_tp_size: 2\n"
    (tmp_path / "accelerate.yaml").write_text(f"{SHARDED}mixed_precision: bf16\n{section}")
    model = "meta-llama/Llama-3.2-1B"
    found = plan(tmp_path, "accelerate.yaml", model_name_or_path=model)
    assert isinstance(found.assessment.run.model, ForeignConfig)
    name, logits = "logits gathered from the ranks of a matrix", 256 * 128256
    assert 0 < found.corrections[name] <= 10 * logits
    chunked = plan(tmp_path, "accelerate.yaml", model_name_or_path=model, use_liger_kernel=True)
    assert name not in chunked.corrections


def test_version_1_of_llama_factory_copies_its_logits(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model: HuggingFaceTB/SmolLM2-135M\nmodel_class: llm\ntrain_dataset: data.yaml\n"
        "micro_batch_size: 8\ncutoff_len: 512\ndist_config:\n  name: fsdp2\n"
    )
    planned = plan_of([read_source(path)], ["--gpu", "H100", "--gpus", "2", "--no-calibration"])
    # it alone may be too much: such a run has no seconds
    full = planned.assessment.used_bytes
    small = dataclasses.replace(planned.cluster, memory_bytes=full)
    assert dataclasses.replace(planned, cluster=small).step_s is None
    assert "per step" in verdict_line(planned)
    assert "per step" not in verdict_line(dataclasses.replace(planned, cluster=small))
    # at most, since the peak may move to the backward, which has no copy
    assert 0 < planned.corrections["logits without the last token's"] <= 4 * 8 * 512 * 49152


def test_ddp_keeps_gradients_beside_its_buckets(tmp_path: Path) -> None:
    once, several = (plan(tmp_path, gradient_accumulation_steps=n) for n in (1, 2))
    name = "gradients beside DDP's buckets"
    assert name in several.corrections
    assert several.allocated_bytes > once.allocated_bytes


def test_fsdp_gathers_each_block_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "accelerate.yaml").write_text(f"{SHARDED}mixed_precision: bf16\n")
    planned = plan(tmp_path, "accelerate.yaml").allocated_bytes
    monkeypatch.setattr(grouping, "SHARED_BYTES", {})  # as our own engine does on a CPU
    assert plan(tmp_path, "accelerate.yaml").allocated_bytes == planned


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fsdp_adds_gradients_up_in_bf16(tmp_path: Path, accumulation: int) -> None:
    (tmp_path / "accelerate.yaml").write_text(f"{SHARDED}mixed_precision: bf16\n")
    planned = plan(tmp_path, "accelerate.yaml", gradient_accumulation_steps=accumulation)
    name = "gradients added up in the type of computing"
    assert (name in planned.corrections) is (accumulation > 1)


def test_either_file_recomputes(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(f"{SHARDED}  fsdp_activation_checkpointing: true\n")
    planned = plan(tmp_path, "accelerate.yaml", gradient_checkpointing=False)
    assert planned.fields["activation_checkpointing"] == "full"


def test_allocated_bytes_are_those_of_blocks(tmp_path: Path) -> None:
    planned = plan(tmp_path)
    tensors = planned.assessment.prediction.peak_bytes + sum(planned.corrections.values())
    assert tensors < planned.allocated_bytes < 1.05 * tensors


def test_ligers_kernels_keep_less(tmp_path: Path) -> None:
    kept = []
    for liger in (False, True):
        planned = plan(tmp_path, use_liger_kernel=liger, block_size=1024, bf16=True)
        kept.append(planned.assessment.highest.device.activations_bytes or 0)
    # A gated MLP keeps neither what its gate becomes nor, twice, what comes out of that.
    assert kept[1] < 0.85 * kept[0]


def test_fsdp_1_is_named(tmp_path: Path) -> None:
    for version in ("fsdp_version: 1", ""):  # which is accelerate's default
        (tmp_path / "accelerate.yaml").write_text(SHARDED.replace("fsdp_version: 2", version))
        assert any("FSDP 1" in text for text in plan(tmp_path, "accelerate.yaml").reading.left_out)
    assert plan(tmp_path, fsdp="full_shard").reading.left_out == []  # transformers' is 2


def test_deepspeed_has_a_second_bucket_where_it_overlaps(tmp_path: Path) -> None:
    found = []
    for section in ({"stage": 1}, {"stage": 1, "overlap_comm": True}):
        (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": section}))
        found.append(plan(tmp_path, deepspeed="zero.json").allocated_bytes)
    assert found[0] < found[1]


def of_trl(folder: Path, **more: Any) -> Planned:
    """Plan a run of `trl sft` on an H100."""
    names = {"max_length": 512, "dataset_name": "texts", "output_dir": "out", "use_peft": True}
    document = {"model_name_or_path": ARGUMENTS["model_name_or_path"], **names, **more}
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in document.items())
    (folder / "sft.yaml").write_text(text)
    return plan_of([read_source(folder / "sft.yaml")], ["--gpu", "H100", "--no-calibration"])


def test_trl_holds_a_tile_of_logits(tmp_path: Path) -> None:
    planned = of_trl(tmp_path, use_peft=False, dtype="bfloat16")
    temporary = planned.assessment.highest.device.temporary_bytes or 0
    assert temporary > 4 * 512 * 32_768 * 2


def test_frozen_weights_in_fp32_are_cast_for_each_product(tmp_path: Path) -> None:
    low, whole = (of_trl(tmp_path, dtype=dtype) for dtype in ("bfloat16", "float32"))
    weights = planned_weights(low)
    assert whole.corrections["frozen weights in fp32"] == weights
    assert whole.allocated_bytes > low.allocated_bytes + weights


def planned_weights(planned: Planned) -> int:
    """Return the bytes of frozen weights in bf16."""
    return planned.assessment.prediction.held.device.frozen_bytes


def test_quantized_layers_return_the_type_of_their_input(tmp_path: Path) -> None:
    low, whole = (
        of_trl(tmp_path, dtype=dtype, load_in_4bit=True, gradient_checkpointing=False)
        for dtype in ("bfloat16", "float32")
    )
    kept = [planned.assessment.highest.device.activations_bytes or 0 for planned in (low, whole)]
    assert kept[1] > 1.3 * kept[0]  # tables in fp32 have blocks hand on fp32


def test_dropout_of_adapters_is_trls_own(tmp_path: Path) -> None:
    with_default, without = of_trl(tmp_path), of_trl(tmp_path, lora_dropout=0)
    assert with_default.fields["lora_dropout"] == 0.05
    assert "lora_dropout" not in without.fields
    assert without.allocated_bytes <= with_default.allocated_bytes


def test_litgpt_has_a_head_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "lit.yaml").write_text(
        "model_name: SmolLM2-135M\nprecision: 32-true\ndevices: 1\n"
        "train:\n  micro_batch_size: 1\n  global_batch_size: 2\n  max_seq_length: 256\n"
        "lora_r: 8\nlora_query: true\n"
    )
    sources = [read_source(tmp_path / "lit.yaml")]
    planned = plan_of(sources, ["--gpu", "H100", "--no-calibration"])
    assert planned.corrections["gradients of the logits in chunks"] < 0
    model = planned.assessment.run.model
    assert not model.tied
    assert model.parameter_count - model.trained_parameter_count == 134_515_008 + 49_152 * 576


def test_the_order_of_files_does_not_matter(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    (tmp_path / "zero.json").write_text(json.dumps({**zero, "gradient_clipping": "auto"}))
    (tmp_path / "args.json").write_text(json.dumps(ARGUMENTS))
    asked = ["--gpu", "H100", "--gpus", "2", "--no-calibration"]
    names = ("zero.json", "args.json")
    one, other = (
        plan_of([read_source(tmp_path / name) for name in order], asked)
        for order in (names, names[::-1])
    )
    assert one.reading.kind is other.reading.kind
    assert one.fields == other.fields
    assert one.fields["zero"] == 2
    assert one.allocated_bytes == other.allocated_bytes


def test_smaller_micro_batches_are_tried_in_turn(tmp_path: Path) -> None:
    for micro in (4, 8, 16):
        planned = plan(tmp_path, per_device_train_batch_size=micro)
        sizes = [
            edit["per_device_train_batch_size"]
            for _, edit in _edits(planned)
            if "per_device_train_batch_size" in edit
        ]
        assert sizes == [micro // 2, 1]


def test_nodes_have_as_many_gpus_as_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(SHARDED.replace("processes: 2", "processes: 12") + "num_machines: 2\n")
    (tmp_path / "args.json").write_text(json.dumps(ARGUMENTS))
    sources = [read_source(tmp_path / name) for name in ("launch.yaml", "args.json")]
    planned = plan_of(sources, ["--gpu", "H100", "--no-calibration"])
    assert (planned.cluster.world_size, planned.cluster.ranks_per_node) == (12, 6)


def test_adapters_are_beside_the_layers_that_a_config_names(tmp_path: Path) -> None:
    default, attention = (
        of_trl(tmp_path, **more)
        for more in ({}, {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]})
    )
    ranks, width, queries, values, blocks = 16, 576, 576, 192, 30
    of_two = ranks * (2 * width + queries + values) * blocks
    assert default.assessment.run.model.trained_parameter_count == of_two
    assert attention.assessment.run.model.trained_parameter_count > 1.9 * of_two
