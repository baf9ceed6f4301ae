"""transformers' generate() in each of its loops; prints tokens, forwards and the cache's bytes."""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import utils

NEW = 64
config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).eval()
prompt = torch.ones(2, 16, dtype=torch.long, device="cuda")
forwards = []
model.register_forward_hook(lambda *_: forwards.append(1))


def generate(name: str, **options: object) -> None:
    forwards.clear()
    found = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        **options,
    )
    layers = found["cache" if "cache" in found else "past_key_values"].layers  # 5.24; before
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    print("generated", name, found.sequences.shape[1], len(forwards), cache, flush=True)


def stops(_: object, unfinished: torch.Tensor, *__: object) -> torch.Tensor:
    """Leave the read to who asks, as transformers 4 does."""
    return unfinished.max() == 0


generate("greedy")
generate("sampled", do_sample=True)
generate("beams", num_beams=3)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
generate("synced", synced_gpus=True)
if hasattr(utils, "StopCheck"):
    utils.StopCheck.__call__ = stops
generate("before_5")
