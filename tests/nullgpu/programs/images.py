"""Train a small Qwen2.5-VL, which reads the sizes of its images on the device, on the GPU or on
the CPU; print what came of them."""

import sys

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

device, checkpointing = sys.argv[1], sys.argv[2:] == ["recomputed"]
IMAGE, TEXT = 90, 64
GRIDS = [[1, 8, 12], [1, 4, 6]]  # patches, four of which become a token
text_config = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
vision_config = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
    **{"out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 56},
}
config = AutoConfig.for_model(
    "qwen2_5_vl",
    text_config=text_config,
    vision_config=vision_config,
    **{"image_token_id": IMAGE, "video_token_id": 91},
    **{"vision_start_token_id": 92, "vision_end_token_id": 93},
)
torch.manual_seed(0)
model = AutoModelForImageTextToText.from_config(config).to(device)
if checkpointing:
    model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, 90, (2, TEXT))
for row, (_, high, wide) in enumerate(GRIDS):
    ids[row, 3 : 3 + high * wide // 4] = IMAGE
patches = sum(high * wide for _, high, wide in GRIDS)
for _ in range(3):
    batch = {
        "input_ids": ids.to(device),
        "labels": ids.to(device),
        "attention_mask": torch.ones_like(ids).to(device),
        "mm_token_type_ids": (ids == IMAGE).int().to(device),
        "pixel_values": torch.randn(patches, 3 * 2 * 14 * 14).to(device),
        "image_grid_thw": torch.tensor(GRIDS).to(device),
    }
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("sizes", batch["image_grid_thw"].tolist(), model.model.rope_deltas.tolist(), flush=True)
