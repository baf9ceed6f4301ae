"""Configs as strangers write them, one of a kind each, with key names of public projects."""

from typing import Final

_ACCELERATE: Final = """compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
num_machines: 1
rdzv_backend: static
same_network: true
use_cpu: false
"""
_AXOLOTL: Final = """datasets:
  - path: someone/dialogues
    type: chat_template
val_set_size: 0.05
output_dir: ./out
num_epochs: 2
learning_rate: 0.0002
lr_scheduler: cosine
wandb_project:
warmup_ratio: 0.1
"""
_FACTORY_1: Final = (
    "model: Qwen/Qwen3-0.6B\nmodel_class: llm\nkernel_config:\n  name: auto\n"
    "train_dataset: data.yaml\noutput_dir: out\nmicro_batch_size: 2\ncutoff_len: 2048\n"
    "learning_rate: 1.0e-4\nmax_steps: 10\nsample_backend: hf\nmax_new_tokens: 128\n"
)
_FACTORY: Final = """stage: sft
do_train: true
dataset: my_answers
template: llama3
output_dir: saves/mine
logging_steps: 10
plot_loss: true
learning_rate: 1.0e-5
num_train_epochs: 1.0
lr_scheduler_type: cosine
"""
_TITAN: Final = """[job]
dump_folder = "./out"
[metrics]
log_freq = 5
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 100
"""
_LITGPT: Final = """out_dir: out/mine
data:
  class_path: litgpt.data.JSON
  init_args:
    mask_prompt: true
eval:
  interval: 50
seed: 7
"""
_ZERO3: Final = """{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
 "overlap_comm": true, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
 "stage3_gather_16bit_weights_on_model_save": true}, "gradient_clipping": 1.0,
 "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
"""
_TRAINER: Final = "output_dir: out\nlearning_rate: 2.0e-5\nlogging_steps: 10\nsave_steps: 500\n"

SAMPLES: Final[dict[str, str]] = {
    # accelerate
    "acc_ddp.yaml": _ACCELERATE + "distributed_type: MULTI_GPU\nnum_processes: 4\n"
    "mixed_precision: bf16\ngpu_ids: all\n",
    "acc_one.yaml": _ACCELERATE + "distributed_type: 'NO'\nnum_processes: 1\n"
    "mixed_precision: fp16\n",
    "acc_fsdp1.yaml": _ACCELERATE + "distributed_type: FSDP\nnum_processes: 8\n"
    "mixed_precision: bf16\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_use_orig_params: true\n"
    "  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_offload_params: false\n",
    "acc_fsdp1_hybrid.yaml": _ACCELERATE.replace("machines: 1", "machines: 2")
    + "distributed_type: FSDP\nnum_processes: 16\nmixed_precision: bf16\nfsdp_config:\n"
    "  fsdp_sharding_strategy: 4\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
    "acc_fsdp2.yaml": _ACCELERATE + "distributed_type: FSDP\nnum_processes: 4\n"
    "mixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n"
    "  fsdp_activation_checkpointing: true\n  fsdp_cpu_ram_efficient_loading: true\n",
    "acc_zero2.yaml": _ACCELERATE + "distributed_type: DEEPSPEED\nnum_processes: 8\n"
    "mixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 2\n  zero3_init_flag: false\n"
    "  gradient_accumulation_steps: 2\n  offload_optimizer_device: cpu\n"
    "  offload_param_device: none\n",
    "acc_parallel.yaml": _ACCELERATE + "distributed_type: FSDP\nnum_processes: 8\n"
    "mixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\nparallelism_config:\n"
    "  parallelism_config_cp_size: 2\n  parallelism_config_dp_shard_size: 4\n"
    "  parallelism_config_tp_size: 1\n",
    # transformers
    "args.json": '{"output_dir": "out", "per_device_train_batch_size": 4, "bf16": true,\n'
    ' "gradient_accumulation_steps": 8, "learning_rate": 5e-05, "num_train_epochs": 3.0,\n'
    ' "model_name_or_path": "meta-llama/Llama-3.2-1B", "block_size": 1024,\n'
    ' "optim": "adamw_torch", "gradient_checkpointing": true, "report_to": ["none"]}\n',
    "args.yaml": _TRAINER + "model_name_or_path: gpt2-medium\nmax_seq_length: 1024\n"
    "per_device_train_batch_size: 16\nfp16: true\noptim: adafactor\ntorch_compile: true\n",
    "run_clm.sh": "#!/bin/bash\nset -e\nexport HF_HOME=/data\n\ntorchrun --nproc_per_node 2 \\\n"
    "  run_clm.py --model_name_or_path gpt2 --dataset_name wikitext \\\n"
    "  --per_device_train_batch_size 8 --do_train --bf16 True \\\n"
    '  --output_dir "$OUT" --learning_rate 3e-4 --block_size 512  # a comment\n',
    "finetune.sh": "accelerate launch --num_processes 4 --mixed_precision bf16 train.py \\\n"
    "  --model_name_or_path=Qwen/Qwen2.5-1.5B --output_dir=out --learning_rate=1e-5 \\\n"
    "  --per_device_train_batch_size=2 --model_max_length=2048 --use_liger_kernel \\\n"
    '  --fsdp "full_shard auto_wrap" --gradient_checkpointing\n',
    "args_fsdp.json": '{"output_dir": "o", "learning_rate": 1e-5, "num_processes": 8,\n'
    ' "per_device_train_batch_size": 1, "model_name_or_path": "Qwen/Qwen3-8B", "bf16": true,\n'
    ' "max_length": 4096, "fsdp": ["shard_grad_op", "auto_wrap"], "fsdp_config":\n'
    ' {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"], "xla": false}}\n',
    # trl
    "sft.yaml": _TRAINER + "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: trl-lib/Capybara\n"
    "packing: true\nmax_length: 2048\nper_device_train_batch_size: 2\n",
    "sft_lora.yaml": _TRAINER + "model_name_or_path: Qwen/Qwen2.5-7B\nmax_length: 1024\n"
    "dataset_name: someone/pairs\nuse_peft: true\nlora_r: 32\nlora_alpha: 64\n"
    "lora_target_modules: all-linear\nload_in_4bit: true\ntorch_dtype: bfloat16\n",
    "sft_whole.yaml": _TRAINER + "model_name_or_path: meta-llama/Llama-3.1-8B\nnum_processes: 8\n"
    "dataset_name: someone/pairs\nloss_type: nll\neos_token: <|eot_id|>\ndeepspeed: zero3.json\n"
    "attn_implementation: kernels-community/flash-attn2\n",
    "sft.sh": "trl sft --model_name_or_path HuggingFaceTB/SmolLM2-360M --dataset_name a/b \\\n"
    "  --output_dir out --max_length 1024 --per_device_train_batch_size 4 --learning_rate 1e-4\n",
    "grpo.yaml": _TRAINER + "model_name_or_path: Qwen/Qwen3-1.7B\nnum_generations: 8\n"
    "max_completion_length: 512\nuse_vllm: true\ndataset_name: a/b\npacking: false\n",
    # Axolotl
    "qlora.yml": _AXOLOTL + "base_model: meta-llama/Llama-3.1-8B\nload_in_4bit: true\n"
    "adapter: qlora\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\nsequence_len: 4096\n"
    "sample_packing: true\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
    "optimizer: paged_adamw_32bit\nbf16: auto\ntf32: false\ngradient_checkpointing: true\n"
    "attn_implementation: flash_attention_2\n",
    "lora.yml": _AXOLOTL + "base_model: Qwen/Qwen3-4B-Instruct-2507\nadapter: lora\nlora_r: 16\n"
    "lora_target_modules: [q_proj, k_proj, v_proj, o_proj]\nsequence_len: 2048\n"
    "micro_batch_size: 4\noptimizer: adamw_8bit\nbf16: true\ngradient_checkpointing: offload\n"
    "plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n",
    "full.yml": _AXOLOTL + "base_model: NousResearch/Llama-3.2-1B\nsequence_len: 2048\n"
    "micro_batch_size: 8\ngradient_accumulation_steps: 2\noptimizer: adamw_bnb_8bit\nbf16: auto\n"
    "gradient_checkpointing: false\nsdp_attention: true\n",
    "fsdp2.yml": _AXOLOTL + "base_model: mistralai/Mistral-7B-v0.1\nsequence_len: 4096\n"
    "micro_batch_size: 1\noptimizer: adamw_torch_fused\nbf16: true\nworld_size: 8\n"
    "fsdp_version: 2\nfsdp_config:\n  offload_params: false\n  reshard_after_forward: true\n"
    "  transformer_layer_cls_to_wrap: MistralDecoderLayer\n  activation_checkpointing: true\n",
    "zero.yml": _AXOLOTL + "base_model: Qwen/Qwen2.5-3B\nsequence_len: 2048\nmicro_batch_size: 2\n"
    "bf16: true\nworld_size: 4\ndeepspeed: zero3.json\nflash_attention: true\n",
    "dpo.yml": _AXOLOTL + "base_model: Qwen/Qwen2.5-0.5B\nsequence_len: 1024\n"
    "micro_batch_size: 2\nrl: dpo\nbf16: true\n",
    # LLaMA-Factory
    "lf_full.yaml": _FACTORY + "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\n"
    "finetuning_type: full\ndeepspeed: zero3.json\ncutoff_len: 2048\nnum_gpus: 8\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nbf16: true\n",
    "lf_lora.yaml": _FACTORY + "model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct\n"
    "finetuning_type: lora\nlora_rank: 8\nlora_target: all\ncutoff_len: 2048\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nbf16: true\n",
    "lf_qlora.yaml": _FACTORY + "model_name_or_path: Qwen/Qwen2.5-14B\nfinetuning_type: lora\n"
    "lora_target: q_proj,v_proj\nquantization_bit: 4\nquantization_method: bnb\n"
    "double_quantization: true\ncutoff_len: 1024\nbf16: true\nenable_liger_kernel: true\n",
    "lf_pure.yaml": _FACTORY + "model_name_or_path: Qwen/Qwen2.5-1.5B\nfinetuning_type: full\n"
    "pure_bf16: true\noptim: adamw_8bit\ncutoff_len: 4096\nflash_attn: fa2\n"
    "disable_gradient_checkpointing: true\nper_device_train_batch_size: 1\n",
    "lf_freeze.yaml": _FACTORY + "model_name_or_path: Qwen/Qwen2.5-0.5B\nfinetuning_type: freeze\n"
    "freeze_trainable_layers: 4\nuse_badam: true\ncutoff_len: 512\nfp16: true\n",
    "lf1_fsdp2.yaml": _FACTORY_1 + "dist_config:\n  name: fsdp2\n  dcp_path: null\n",
    "lf1_cp.yaml": _FACTORY_1 + "dist_config:\n  name: fsdp2\ncp_mode: ulysses\ncp_size: 2\n"
    "flash_attn: flash_attention_2\nglobal_batch_size: 16\n",
    "lf1_qlora.yaml": _FACTORY_1 + "peft_config:\n  name: lora\n  r: 16\n  lora_alpha: 32\n"
    "  target_modules: all\nquant_config:\n  name: bnb\n  quantization_bit: 4\n",
    "lf1_zero.yaml": _FACTORY_1 + "dist_config:\n  name: deepspeed\n  config_file: zero3.json\n",
    # torchtitan
    "titan_8b.toml": _TITAN + '[model]\nname = "llama3"\nflavor = "8B"\n[training]\n'
    'local_batch_size = 2\nseq_len = 8192\nsteps = 10\ndataset = "c4"\n[parallelism]\n'
    "data_parallel_shard_degree = -1\n[activation_checkpoint]\nmode = 'selective'\n"
    "selective_ac_option = 'op'\n",
    "titan_tp.toml": _TITAN + '[model]\nname = "llama3"\nflavor = "70B"\n[training]\n'
    "local_batch_size = 8\nseq_len = 8192\n[parallelism]\ntensor_parallel_degree = 8\n"
    "[activation_checkpoint]\nmode = 'full'\n[compile]\nenable = true\n",
    "titan_old.toml": _TITAN + '[model]\nname = "llama2"\nflavor = "7B"\nnorm_type = "rmsnorm"\n'
    "[training]\nbatch_size = 8\nseq_len = 2048\ndata_parallel_shard_degree = -1\ncompile = false\n"
    "[activation_checkpoint]\nmode = 'full'\n",
    "titan_fp8.toml": _TITAN + '[model]\nname = "qwen3"\nflavor = "8B"\nconverters = ["float8"]\n'
    "[training]\nlocal_batch_size = 1\nseq_len = 4096\n[parallelism]\n"
    "data_parallel_replicate_degree = 2\npipeline_parallel_degree = 2\n[compile]\nenable = true\n"
    "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n",
    "titan_2026.sh": "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 \\\n"
    "  --config llama3_8b --training.steps 10 --training.max_context_length 8192 \\\n"
    "  --training.num_tokens_per_microbatch_per_dp_rank 16384\n",
    # DeepSpeed
    "zero3.json": _ZERO3,
    "zero2.json": '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2,\n'
    ' "offload_optimizer": {"device": "cpu", "pin_memory": true}, "reduce_bucket_size": 2e8},\n'
    ' "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 100}\n',
    "zero1.json": '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1},\n'
    ' "train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "AdamW",\n'
    ' "params": {"lr": "auto"}}, "scheduler": {"type": "WarmupLR"}}\n',
    "zeropp.json": '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3,\n'
    ' "zero_hpz_partition_size": 8, "zero_quantized_weights": true},\n'
    ' "train_micro_batch_size_per_gpu": 1, "activation_checkpointing":\n'
    ' {"partition_activations": true}}\n',
    # LitGPT
    "lit_full.yaml": _LITGPT + "checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3.1-8B\n"
    "precision: bf16-true\ndevices: 4\ntrain:\n  global_batch_size: 64\n  micro_batch_size: 1\n"
    "  max_seq_length: 512\n  lr_warmup_steps: 25\noptimizer:\n  class_path: torch.optim.AdamW\n",
    "lit_qlora.yaml": _LITGPT + "checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B\n"
    "precision: bf16-true\nquantize: bnb.nf4\nlora_r: 32\nlora_alpha: 16\nlora_query: true\n"
    "lora_value: true\nlora_mlp: false\ntrain:\n  micro_batch_size: 2\n  max_seq_length: 512\n"
    "  global_batch_size: 8\n",
    "lit_pretrain.yaml": _LITGPT + "model_name: tiny-llama-1.1b\nprecision: bf16-mixed\n"
    "devices: 8\ntokenizer_dir: checkpoints/a\ntrain:\n  global_batch_size: 512\n"
    "  micro_batch_size: 4\n  max_norm: 1.0\n  max_tokens: 3000000000\n",
    "lit_old.yaml": _LITGPT + "checkpoint_dir: checkpoints/stabilityai/stablelm-base-alpha-3b\n"
    "precision: bf16-true\ntrain:\n  micro_batch_size: 1\n  max_seq_length: 512\n",
}
"""Name -> text; `zero3.json` lies beside those that name it."""
ASKED: Final[dict[str, tuple[str, ...]]] = {
    "acc": ("--model", "llama-3.2-1b", "--micro-batch", "1", "--seq-len", "512"),
    "zero": ("--model", "llama-3.2-1b", "--micro-batch", "1", "--seq-len", "512", "--gpus", "8"),
    "titan": ("--gpus", "16"),
    "lf1": ("--gpus", "4"),
}
"""First letters of a name -> what its file does not say."""
REFUSED: Final = ("lit_old.yaml",)
"""Those that are refused, since the model has no name."""


def asked(name: str) -> tuple[str, ...]:
    """Flags for what a sample does not say."""
    if name == "zero.yml":
        return ()
    return next((flags for start, flags in ASKED.items() if name.startswith(start)), ())
