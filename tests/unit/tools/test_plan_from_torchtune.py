"""`plan --from`: torchtune's recipes, written as its recipes/configs has them."""

from pathlib import Path

import pytest

from launcher.tools.plan_from.assess import Planned, plan_of
from launcher.tools.plan_from.reading import read_source
from launcher.tools.plan_from.translate import read_files
from launcher.util.errors import UserError
from launcher.util.sizes import GIB

RECIPE = """output_dir: /tmp/torchtune/out
tokenizer:
  _component_: torchtune.models.{family}.{family}_tokenizer
  path: /tmp/model/tokenizer.model
  max_seq_len: {length}
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False
seed: null
shuffle: True
model:
  _component_: torchtune.models.{family}.{builder}
{model}checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /tmp/model
  checkpoint_files: [model-00001-of-00002.safetensors, model-00002-of-00002.safetensors]
  recipe_checkpoint: null
  output_dir: ${{output_dir}}
  model_type: LLAMA3
resume_from_checkpoint: False
batch_size: 2
epochs: 1
optimizer:
  _component_: {optimizer}
  lr: 2e-5
loss:
  _component_: {loss}
max_steps_per_epoch: null
gradient_accumulation_steps: {accumulation}
clip_grad_norm: null
compile: False
{more}device: cuda
enable_activation_checkpointing: True
enable_activation_offloading: False
dtype: bf16
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${{output_dir}}/logs
log_every_n_steps: 1
log_peak_memory_stats: True
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""
LORA = """  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 16
  lora_alpha: 32
  lora_dropout: 0.0
"""


def recipe(folder: Path, family: str, builder: str, **changes: object) -> Path:
    values = {"length": 1024, "optimizer": "torch.optim.AdamW", "accumulation": 8} | changes
    loss = "torchtune.modules.loss.LinearCrossEntropyLoss"
    values = {"model": "", "more": "", "loss": loss} | values
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(family=family, builder=builder, **values))
    return path


def plan(path: Path, *options: str) -> Planned:
    asked = ["--gpu", "A100-80GB", "--no-calibration", *options]
    return plan_of([read_source(path)], asked)


def test_a_recipe_of_one_device_keeps_all_of_it_in_bf16(tmp_path: Path) -> None:
    path = recipe(
        tmp_path,
        "llama3_2",
        "llama3_2_1b",
        optimizer="bitsandbytes.optim.PagedAdamW8bit",
        accumulation=1,
        more="optimizer_in_bwd: True\n",
    )
    planned = plan(path)
    assert planned.fields == planned.fields | {
        "model": "llama-3.2-1b",
        "seq_len": 1024,
        "micro_batch": 2,
        "global_batch": 2,
        "strategy": "single",
        "precision": "bf16-pure",
        "compensation": False,
        "optimizer": "adamw8bit",
        "optimizer_in_backward": True,
        "clip": 0.0,
        "activation_checkpointing": "full",
    }
    assert planned.reading.left_out == []


def test_a_published_peak_is_planned(tmp_path: Path) -> None:
    """torchtune-3b-full in bench/published/frameworks.csv: Llama 3.2 3B on an A100."""
    loss = "torchtune.modules.loss.CEWithChunkedOutputLoss"
    path = recipe(tmp_path, "llama3_2", "llama3_2_3b", length=4096, accumulation=1, loss=loss)
    assert plan(path).allocated_bytes / GIB == pytest.approx(24.9, rel=0.02)


def test_adapters_of_a_recipe_of_several(tmp_path: Path) -> None:
    path = recipe(tmp_path, "qwen2_5", "lora_qwen2_5_0_5b", model=LORA)
    planned = plan(path, "--gpus", "2")
    assert planned.fields == planned.fields | {
        "model": "qwen2.5-0.5b",
        "global_batch": 32,
        "strategy": "fsdp",
        "lora_rank": 16,
        "lora_targets": "qkv,proj,mlp",
    }
    assert planned.reading.left_out == []


@pytest.mark.parametrize(
    ("family", "builder", "model"),
    [
        ("llama3_1", "llama3_1_8b", "llama-3.1-8b"),
        ("llama3_3", "llama3_3_70b", "llama-3.1-70b"),
        ("code_llama2", "lora_code_llama2_7b", "codellama-7b"),
        ("qwen2_5", "qwen2_5_14b_instruct", "qwen2.5-14b"),
        ("qwen3", "qwen3_0_6b_base", "qwen3-0.6b"),
        ("gemma2", "gemma2_9b", "gemma-2-9b"),
        ("phi3", "phi3_mini", "phi-3-mini-4k"),
        ("phi4", "phi4_14b", "phi-4"),
        ("mistral", "mistral_7b", "mistral-7b"),
    ],
)
def test_builders_of_models_have_our_names(
    tmp_path: Path, family: str, builder: str, model: str
) -> None:
    reading = read_files([read_source(recipe(tmp_path, family, builder))])
    assert reading.facts["model"] == model


def test_quantized_builders_and_unknown_ones(tmp_path: Path) -> None:
    path = recipe(tmp_path, "llama3_1", "qlora_llama3_1_8b", model=LORA)
    assert read_files([read_source(path)]).facts["quantize_base"] == "nf4"
    path = recipe(tmp_path, "llama3_2_vision", "llama3_2_vision_11b")
    with pytest.raises(
        UserError, match=r"its model torchtune\.models\.llama3_2_vision\.\w+ has no"
    ):
        plan(path)
