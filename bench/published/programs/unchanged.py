"""Small programs of many libraries, which know nothing of shardscale, for rehearsals_unchanged.py.

python unchanged.py NAME MODEL       # MODEL: a folder of transformers with config and weights
"""

import os
import sys
import tempfile
from typing import Any

import torch

TOKENS = 256
name, folder = sys.argv[1:3]
out = tempfile.mkdtemp()


class Ids(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of one token."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((TOKENS,), 5)
        return {"input_ids": ids, "labels": ids.clone()}


def small() -> Any:
    """Return a small Llama."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    return AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=4, **sizes))


def loop(model: Any, batch: Any, loss_of: Any, optimizer: Any = None) -> None:
    """Train five steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(5):
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())


def trainer(model: Any, **more: Any) -> None:
    """Train with transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        out, max_steps=5, bf16=True, report_to=[], logging_steps=1, **more
    )
    Trainer(model=model, args=arguments, train_dataset=Ids()).train()


def trainer_lora(**how: Any) -> None:
    """Load weights, add adapters, train."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="cuda", **how
    )
    if how:
        model = prepare_model_for_kbit_training(model)
    trainer(get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")))


def trainer_qlora() -> None:
    """Do it with weights in NF4."""
    from transformers import BitsAndBytesConfig

    bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    trainer_lora(quantization_config=bits)


def tokenizer() -> Any:
    """Return a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<pad>", "<eos>", "<unk>", "word"))}
    built = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=built, **names)


def trl_sft() -> None:
    """Train with trl's SFTTrainer, packed, with LoRA."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    SFTTrainer(
        model=small(),
        args=SFTConfig(out, max_steps=5, bf16=True, packing=True, max_length=TOKENS, report_to=[]),
        train_dataset=Dataset.from_dict({"text": ["word " * 300] * 64}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(target_modules="all-linear"),
    ).train()


def trl_dpo() -> None:
    """Train with trl's DPOTrainer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = {"prompt": ["word"] * 64, "chosen": ["word " * 50] * 64, "rejected": ["word"] * 64}
    DPOTrainer(
        model=small(),
        ref_model=small(),
        args=DPOConfig(out, max_steps=5, bf16=True, report_to=[]),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
    ).train()


def accelerate_fsdp2() -> None:
    """Shard with accelerate's FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = small()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        torch.utils.data.DataLoader(Ids(), batch_size=2),
    )
    for batch in list(loader)[:5]:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def deepspeed_zero(stage: int, offload: bool = False) -> None:
    """Train with DeepSpeed itself."""
    import deepspeed

    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=small(), config=config)
    ids = torch.full((2, TOKENS), 5, device=engine.device)
    for _ in range(5):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def lightning_trainer() -> None:
    """Train with Lightning's Trainer."""
    import lightning  # type: ignore[import-not-found]

    class Module(lightning.LightningModule):  # type: ignore[misc]
        """The small Llama."""

        def __init__(self) -> None:
            super().__init__()
            self.model = small()

        def training_step(self, batch: Any, index: int) -> Any:
            """Return the loss."""
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            """Return AdamW."""
            return torch.optim.AdamW(self.parameters())

    lightning.Trainer(
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=5,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
    ).fit(Module(), torch.utils.data.DataLoader(Ids(), batch_size=2))


def plain_loop(compiled: bool) -> None:
    """Train as nanoGPT does: DDP, autocast, fused AdamW."""
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model: Any = small().cuda()
    model = torch.compile(model) if compiled else model
    model = torch.nn.parallel.DistributedDataParallel(model)
    ids = torch.full((2, TOKENS), 5, device="cuda")

    def loss_of(model: Any, ids: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    loop(model, ids, loss_of, torch.optim.AdamW(model.parameters(), fused=True))
    torch.distributed.destroy_process_group()


def titan_loop() -> None:
    """Train as torchtitan does: a mesh, FSDP2 per block, checkpointing, compiled blocks."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    model = small().cuda()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for number, block in enumerate(model.model.layers):
        block = checkpoint_wrapper(block)
        block.compile()
        model.model.layers[number] = fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    ids = torch.full((2, TOKENS), 5, device="cuda")
    loop(model, ids, lambda model, ids: model(input_ids=ids, labels=ids).loss)
    torch.distributed.destroy_process_group()


def liger() -> None:
    """Train with Liger's Triton kernels in the Trainer."""
    trainer(small(), use_liger_kernel=True)


def image(kind: str) -> None:
    """Train a classifier of images."""
    import torchvision  # type: ignore[import-not-found]

    model = torchvision.models.get_model(kind, num_classes=10).cuda()
    images, classes = torch.randn(8, 3, 224, 224), torch.arange(8)
    loop(
        model,
        (images.cuda(), classes.cuda()),
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


def unet() -> None:
    """Train a UNet of diffusers."""
    from diffusers import DDPMScheduler, UNet2DModel  # type: ignore[import-not-found]

    model = UNet2DModel(sample_size=64, block_out_channels=(64, 128, 256, 256)).cuda()
    images = torch.randn(4, 3, 64, 64, device="cuda")
    scheduler = DDPMScheduler()

    def loss_of(model: Any, images: Any) -> Any:
        noise, times = torch.randn_like(images), torch.randint(0, 1000, (4,), device="cuda")
        noisy = scheduler.add_noise(images, noise, times)
        return torch.nn.functional.mse_loss(model(noisy, times).sample, noise)

    loop(model, images, loss_of)


PROGRAMS: dict[str, Any] = {
    "trainer": lambda: trainer(small()),
    "trainer-lora": trainer_lora,
    "trainer-qlora": trainer_qlora,
    "trl-sft": trl_sft,
    "trl-dpo": trl_dpo,
    "accelerate-fsdp2": accelerate_fsdp2,
    "deepspeed-zero2": lambda: deepspeed_zero(2),
    "deepspeed-zero3": lambda: deepspeed_zero(3),
    "deepspeed-offload": lambda: deepspeed_zero(3, offload=True),
    "lightning": lightning_trainer,
    "nanogpt-loop": lambda: plain_loop(compiled=False),
    "compile": lambda: plain_loop(compiled=True),
    "torchtitan-loop": titan_loop,
    "liger": liger,
    "resnet": lambda: image("resnet50"),
    "vit": lambda: image("vit_b_16"),
    "unet": unet,
}

if __name__ == "__main__":
    PROGRAMS[name]()
