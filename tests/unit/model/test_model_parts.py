"""Parts of a decoder, found by looking: ours, transformers', and a module that has none."""

import pytest
import torch
from torch import nn

from launcher.model.gpt import GPT
from launcher.model.parts import block_of, in_block, is_projection, parts_of, projections
from launcher.model.sizes import named


def test_parts_of_our_decoder() -> None:
    with torch.device("meta"):
        model = GPT(named("nano"))
    found = parts_of(model)
    assert list(found.embeddings) == ["wte", "wpe"]
    assert found.blocks is model.blocks
    assert list(found.head) == ["ln_f", "head"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_parts_of_a_decoder_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2}
    small |= {"vocab_size": 64, "intermediate_size": 48}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **small)
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = parts_of(model)
    assert len(found.blocks) == 3
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert next(iter(found.embeddings.values())) is embedding
    assert [*found.head.values()][-1] is head
    inside = {name: block_of(name) for name, _ in model.named_parameters()}
    assert {*inside.values()} == {None, 0, 1, 2}
    own = {id(p): number for number, block in enumerate(found.blocks) for p in block.parameters()}
    assert all(inside[name] == own.get(id(p)) for name, p in model.named_parameters())


@pytest.mark.parametrize("lists", [0, 2])
def test_a_module_without_one_list_of_blocks_is_refused(lists: int) -> None:
    module = nn.Module()
    for number in range(lists):
        module.add_module(f"list{number}", nn.ModuleList([nn.Linear(1, 1)]))
    with pytest.raises(TypeError, match="must have one nn"):
        parts_of(module)


def test_names_of_blocks() -> None:
    assert block_of("model.layers.31.self_attn.q_proj.weight") == 31
    assert block_of("blocks.3") == 3
    assert block_of("wte.weight") is None
    assert in_block("blocks.0.mlp.fc.weight", 12) == "blocks.12.mlp.fc.weight"


def test_projections_are_the_linear_layers_of_our_block() -> None:
    config = named("qwen3-0.6b", layers=1)
    with torch.device("meta"):
        model = GPT(config)
    (block,) = model.blocks
    linears = {name: m for name, m in block.named_modules() if isinstance(m, nn.Linear)}
    assert list(projections(config)) == list(linears)
    for name, projection in projections(config).items():
        assert sum(projection.sizes) == linears[name].out_features
    matrices = {f"blocks.0.{name}.weight" for name in linears}
    assert {name for name, _ in model.named_parameters() if is_projection(name)} == matrices
