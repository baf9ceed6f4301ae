"""Decoders of transformers: their sizes, buffers, initial values, heads, and what is refused."""

import copy
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_architectures import ARCHITECTURES, MORE
from torch import Tensor

from launcher.config.arguments import parse_run_config
from launcher.config.compile_choice import KEPT_SHARE
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.forecast.plan_cli import main as plan
from launcher.model import selective
from launcher.model.build import initial_value, new_decoder
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.decoder import ForeignDecoder, skeleton
from launcher.model.foreign.head import ForeignHead, LogitFunction, logit_function
from launcher.model.foreign.reading import foreign_config
from launcher.model.foreign.routing import Routing, load_of
from launcher.model.linears import fp8_linears
from launcher.model.lora_config import Lora
from launcher.model.loss import linear_cross_entropy
from launcher.model.parts import parts_of
from launcher.model.recompute import recomputed
from launcher.model.selective import AllProducts
from launcher.optim.choice import OptimChoice
from launcher.optim.registry import states_of
from launcher.strategies.build_inputs import _to_fp8, materialize_whole
from launcher.strategies.compiled import compile_blocks
from launcher.strategies.parameters import parameter_shapes, trained_shapes
from launcher.util.errors import UserError

CPU = torch.device("cpu")


def built(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        module = new_decoder(config)
    materialize_whole(
        module,
        lambda name, shape: initial_value(name, shape, config, seed=3, device="cpu"),
        device=CPU,
        dtype=dtype,
    )
    return module


def written(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / "config.json"
    fields = {**ARCHITECTURES[name], **changes}
    path.write_text(json.dumps({n: v for n, v in fields.items() if v is not None}))
    return path


def resolved(path: Path | str, world_size: int = 2, **changes: Any) -> ModelConfig:
    config = RunConfig().replace(
        **{"model": str(path), "seq_len": 16, "strategy": "ddp", **changes}
    )
    return resolve(config, world_size=world_size, device_type="cpu").model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_its_sizes_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = foreign_config(ARCHITECTURES[name])
    fields = copy.deepcopy(dict(ARCHITECTURES[name]))
    theirs: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name].from_dict(fields))
    assert config.parameter_count == sum(p.numel() for p in theirs.parameters())
    assert config.tied == theirs.config.tie_word_embeddings
    assert config.layers == len(parts_of(theirs).blocks) == 2
    shapes = {f"causal.{n}": tuple(p.shape) for n, p in theirs.named_parameters()}
    assert parameter_shapes(config) == shapes
    assert config.matmul_parameter_count <= config.parameter_count + config.vocab_size * 32


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1", "llama", "bloom"])
def test_buffers_have_the_values_and_types_of_transformers_own(name: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    fields = copy.deepcopy(dict(ARCHITECTURES[name]))
    theirs: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name].from_dict(fields))
    with torch.device("meta"):
        ours: Any = ForeignDecoder(foreign_config(ARCHITECTURES[name]))
    ours.to_empty(device="cpu").to(torch.bfloat16)
    found = dict(ours.causal.named_buffers())
    for key, buffer in theirs.named_buffers():
        torch.testing.assert_close(found[key], buffer, rtol=0, atol=0)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}


def test_an_initial_value_is_a_function_of_its_name_and_seed() -> None:
    config = foreign_config(ARCHITECTURES["mamba2"])
    shapes = parameter_shapes(config)

    def values(names: list[str], seed: int) -> dict[str, Tensor]:
        return {n: initial_value(n, shapes[n], config, seed=seed, device="cpu") for n in names}

    state = torch.get_rng_state()
    first, backwards = values([*shapes], 1), values([*reversed(shapes)], 1)
    assert all(torch.equal(first[name], backwards[name]) for name in shapes)
    embedding = next(iter(shapes))
    assert not torch.equal(first[embedding], values([embedding], 2)[embedding])
    mixers = [name for name in shapes if name.endswith("mixer.in_proj.weight")]
    assert not torch.equal(*(first[name] for name in mixers))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma2", LogitFunction(softcap=30.0)),
        ("granite", LogitFunction(scale=0.25)),
        ("cohere2", LogitFunction(scale=0.25)),
        ("falcon_h1", LogitFunction(scale=0.5)),
        ("opt", LogitFunction()),
    ],
)
def test_its_head_is_asked_what_it_does(name: str, expected: LogitFunction) -> None:
    assert logit_function(skeleton(json.dumps(ARCHITECTURES[name]), "auto")) == expected


@pytest.mark.parametrize("chunk_rows", [0, 5])
def test_capped_logits_have_the_gradients_of_the_plain_form(chunk_rows: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 8), 3 * torch.randn(20, 8)
    targets = torch.randint(20, (12,))
    targets[3] = -100
    grads = []
    for capped in (False, True):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if capped:
            loss = linear_cross_entropy(x, w, targets, chunk_rows=chunk_rows, softcap=5.0)
        else:
            loss = torch.nn.functional.cross_entropy(5 * torch.tanh(x @ w.t() / 5), targets)
        loss.backward()
        grads.append((loss.detach(), x.grad, w.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ["gemma2", "phi", "granite"])
def test_logits_and_loss_are_those_of_transformers(name: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    ours = built(foreign_config(ARCHITECTURES[name], loss_chunk=7))
    fields = copy.deepcopy(dict(ARCHITECTURES[name]))
    theirs: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name].from_dict(fields))
    theirs.load_state_dict({n.removeprefix("causal."): p for n, p in ours.state_dict().items()})
    tokens = torch.randint(260, (2, 17))
    logits = theirs(input_ids=tokens[:, :-1]).logits
    torch.testing.assert_close(ours(tokens[:, :-1]), logits)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(ours(tokens[:, :-1], tokens[:, 1:]), loss)


def test_a_router_loss_is_added_in_training_only() -> None:
    ours = built(foreign_config(ARCHITECTURES["mixtral"]))
    tokens = torch.randint(260, (2, 17))
    pair = tokens[:, :-1], tokens[:, 1:]
    added = ours(*pair).item() - ours.eval()(*pair).item()
    assert 0.02 * 2 * 0.9 < added < 0.02 * 4  # two experts of four: 2 where they are in balance


def test_a_plan_needs_the_config_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "mixtral")
    flags = "--gpus 2 --gpu-memory 24GiB --strategy fsdp --micro-batch 2 --global-batch 4"
    more = "--precision bf16 --activation-checkpointing full --seq-len 32"
    assert plan([*f"--model {path} {flags} {more}".split()]) == 0
    printed = capsys.readouterr().out
    assert "decoder: transformers' MixtralForCausalLM; " in printed
    assert "parameters active per token; router loss x 0.02" in printed
    assert f"-m launcher.train --model {path}" in printed


def test_our_own_decoder_computes_the_families_it_has(tmp_path: Path) -> None:
    path = written(tmp_path, "llama")
    ours, theirs = resolved(path), resolved(path, decoder="transformers")
    assert type(ours) is ModelConfig
    assert isinstance(theirs, ForeignConfig)
    assert ours.parameter_count == theirs.parameter_count
    assert ours.matmul_parameter_count == theirs.matmul_parameter_count
    assert isinstance(resolved(tmp_path), ModelConfig)  # the folder
    unlike = written(tmp_path, "llama", rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert isinstance(resolved(unlike), ForeignConfig)  # frequencies that ours does not have


REFUSED_CONFIGS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "remote code": (
        {"auto_map": {"AutoModel": "x.Y"}, "model_type": "gemma99"},
        "code that comes with the model",
    ),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised checkpoint"),
    "encoder and decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "a decoder alone"),
    "vision tower": ({"vision_config": {}}, "give its text_config"),
    "unknown": ({"model_type": "gemma99"}, "model_type is 'gemma99'"),
    "no type": ({"model_type": None}, "model_type is None"),
    "no decoder": ({"model_type": "clip"}, "no causal decoder"),
    "wrong type": ({"hidden_size": "large"}, "cannot build this gemma2"),
    "layerdrop": ({**ARCHITECTURES["opt"], "layerdrop": 0.1}, "set it to 0"),
    "state beside parameters": (
        {"model_type": "deepseek_v3", "num_hidden_layers": 4, "n_routed_experts": 8, "n_group": 1},
        "keeps e_score_correction_bias beside its parameters",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_a_config_that_cannot_be_trained_is_one_sentence(name: str, tmp_path: Path) -> None:
    changes, says = REFUSED_CONFIGS[name]
    path = written(tmp_path, "gemma2", **changes)
    with pytest.raises(UserError, match=says) as refused:
        resolved(path)
    assert str(refused.value).startswith(f"--model {path}")


def test_experts_may_be_larger_than_this_machines_memory() -> None:
    experts, width, hidden = 2**16, 2**16, 32
    fields = {"num_local_experts": experts, "intermediate_size": width, "hidden_size": hidden}
    config = foreign_config({**ARCHITECTURES["mixtral"], **fields})
    blocks = ARCHITECTURES["mixtral"]["num_hidden_layers"]
    assert config.parameter_count > 3 * blocks * experts * width * hidden  # of 4 bytes each


def test_a_config_without_sizes_of_its_own_is_one_sentence() -> None:
    small = {"model_type": "persimmon", "hidden_size": 64, "num_hidden_layers": 1}
    with pytest.raises(UserError, match="FuyuForCausalLM has its sizes in a text_config: give"):
        foreign_config({"model_type": "fuyu", "text_config": small})


def test_a_head_with_a_forward_of_its_own_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.dory", reason="transformers 5.24 has it")
    sections = {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0}
    path = written(tmp_path, "qwen3", model_type="dory", **sections)
    with pytest.raises(UserError, match=r"head that computes more than a Linear \(DoryLMHead\)"):
        resolved(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": "muon", "strategy": "zero", "zero": 2}, "muon updates whole matrices"),
        ({"optimizer": "apollo"}, "--apollo-rank 64 is more than the 32 columns"),
        ({"activation_checkpointing": "keep=qkv"}, "keep=qkv knows .* use selective, full"),
        ({"activation_checkpointing": "keep=qkv:1/full:1"}, "use selective, full"),
        ({"activation_checkpointing": "budget=1GiB"}, "use selective, full"),
        ({"activation_checkpointing": "offload"}, "no effect on a CPU: use full"),
        ({"lora_rank": 40, "random_base": True}, "--lora-rank 40 is more than the 16 rows"),
        ({"lora_rank": 4, "lora_targets": "fc1"}, "no fc1: give all, .* q_proj, k_proj"),
        ({"lora_rank": 4, "quantize_base": "nf4", "random_base": True}, "the rows of q_proj have"),
        ({"layers": 3, "norm": "rms"}, "--layers 3 --norm rms knows"),
        ({"mlp_tile": 8}, "--mlp-tile 8 knows"),
        ({"attention": "flash"}, "use one of auto, eager, sdpa"),
        ({"attention": "sdpa-math"}, "--sdpa-backend math knows"),
        ({"attention": "sdpa"}, "cannot build this gemma2"),  # which caps attention's scores
        ({"decoder": "own"}, "only gpt2"),
    ],
)
def test_what_only_our_own_decoder_does_is_refused_by_name(
    changes: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        resolved(written(tmp_path, "gemma2"), **changes)


@pytest.mark.parametrize(
    "fields",
    [
        *(ARCHITECTURES[name] for name in ("gemma2", "mixtral", "falcon_h1")),
        {**ARCHITECTURES["opt"], "dropout": 0.2, "attention_dropout": 0.2},
    ],
    ids=lambda fields: str(fields["model_type"]),
)
def test_no_gradient_depends_on_what_is_recomputed(fields: Mapping[str, Any]) -> None:
    tokens = torch.randint(260, (2, 17))
    found = {}
    for mode in ("none", "selective", "full", "offload", "selective:1/full:1"):
        module = built(foreign_config(fields, activation_checkpointing=mode))
        torch.manual_seed(1)
        loss = module(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found[mode] = [loss.detach(), *(p.grad for p in module.parameters())]
    plain = found.pop("none")
    for mode, others in found.items():
        torch.testing.assert_close(others, plain, msg=lambda text: f"{mode}: {text}")  # noqa: B023


def test_selective_looks_at_matrices_and_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: Counter[str] = Counter()
    dispatch = selective._Selective.__torch_dispatch__

    def counted(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looked_at[func._schema.name] += 1
        return dispatch(mode, func, types, args, kwargs)

    monkeypatch.setattr(selective._Selective, "__torch_dispatch__", counted)
    module = built(
        foreign_config(ARCHITECTURES["gemma3_text"], activation_checkpointing="selective")
    )
    tokens = torch.randint(260, (2, 17))
    module(tokens[:, :-1], tokens[:, 1:]).backward()
    matrices = 7 * len(parts_of(module).blocks)
    assert looked_at["aten::mm"] == 2 * matrices
    assert looked_at["aten::_scaled_dot_product_flash_attention_for_cpu"] > 0
    norms_and_activation = {"aten::rsqrt", "aten::pow", "aten::gelu", "aten::cos"}
    assert not looked_at.keys() & norms_and_activation


def test_compiled_blocks_have_the_gradients_of_others() -> None:
    tokens = torch.randint(260, (2, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for compiled in (False, True):
        model = built(foreign_config(ARCHITECTURES["gemma3_text"]))
        with torch._functorch.config.patch(activation_memory_budget=1.0):  # for the next test
            if compiled:
                compile_blocks(model, kept_share=KEPT_SHARE)
            loss = model(tokens, tokens)
            loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_a_kept_product_that_is_changed_in_place_is_not_changed_again() -> None:
    """DeepSpeed's linear layers add their bias to a product so."""
    weight, bias = torch.randn(8, 8), torch.randn(8)

    def square(x: Tensor) -> Tensor:
        product = x @ weight
        product += bias
        return product * product

    x = torch.randn(4, 8, requires_grad=True)
    kept = recomputed("selective", partial(AllProducts, None), square, x)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (kept, square(x))))


def test_attention_that_draws_numbers_is_computed_again() -> None:
    op, heads = torch.ops.aten._scaled_dot_product_flash_attention.default, 3 * (torch.ones(1),)
    products = AllProducts(None)
    assert products.keeps(op, heads)
    assert products.keeps(op, (*heads, 0.0, True))
    assert not products.keeps(op, (*heads, 0.1, True))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt_oss", {"q_proj", "k_proj", "v_proj", "o_proj", "router"}),  # no biases of experts
        ("mamba", {"in_proj", "x_proj", "dt_proj", "out_proj"}),  # no A_log
    ],
)
def test_matrices_of_blocks_are_those_of_products(name: str, expected: set[str]) -> None:
    config = foreign_config({**ARCHITECTURES, **MORE}[name])
    muon = OptimChoice(optimizer="muon")
    kept = {n: states_of(muon, n, shape) for n, shape in trained_shapes(config).items()}
    assert {n.split(".")[-2] for n, states in kept.items() if len(states) == 1} == expected


JETMOE: Mapping[str, Any] = {
    **{name: value for name, value in MORE["olmo"].items() if name != "num_attention_heads"},
    **{"model_type": "jetmoe", "kv_channels": 8, "num_local_experts": 16},
}


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        (ARCHITECTURES["mixtral"], set()),  # neither experts nor their router are linear layers
        (MORE["qwen2_moe"], {"shared_expert_gate"}),  # one output
        (JETMOE, {"layer"}),  # the router, of 16 experts
        (ARCHITECTURES["mamba2"], {"in_proj"}),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, Mapping) else "",
)
def test_linear_layers_of_sizes_of_fp8_are_rounded_and_no_others(
    fields: Mapping[str, Any], others: set[str]
) -> None:
    with torch.device("meta"):
        module: Any = new_decoder(foreign_config(fields))
    chosen = {id(linear.weight) for linear in fp8_linears(module)}
    module = _to_fp8(module, CPU)
    kinds = [(name.rpartition(".")[2], type(m).__name__, m) for name, m in module.named_modules()]
    assert {name for name, kind, _ in kinds if kind == "Linear"} == others
    assert {id(m.weight) for _, kind, m in kinds if kind == "Float8Linear"} == chosen != set()
    assert type(module.causal.get_output_embeddings()) is ForeignHead


def test_without_linear_layers_of_such_sizes_nothing_is_in_fp8(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MORE["falcon"]))
    changes = {"model": str(path), "seq_len": 16, "precision": "fp8", "strategy": "ddp"}
    with pytest.raises(UserError, match=r"no linear layer of Falcon.* use --precision bf16"):
        resolve(RunConfig().replace(**changes), world_size=2, device_type="cuda", elsewhere=True)


@pytest.mark.parametrize("name", ["bloom", "falcon_h1", "gpt_oss", "mamba2", "opt"])
def test_documents_that_are_not_kept_apart_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--document-attention: .* has no mask of documents"):
        resolved(written(tmp_path, name), document_attention=True)


@pytest.mark.parametrize("name", ["gemma2", "gpt_neox", "mixtral", "phi3", "smollm3"])
def test_documents_in_one_sequence_are_computed_as_if_alone(name: str, tmp_path: Path) -> None:
    config = resolved(written(tmp_path, name), document_attention=True)
    assert isinstance(config, ForeignConfig)
    module = built(config).eval()
    tokens, bounds = torch.randint(3, 250, (1, 24)), (0, 11, 12, 24)
    pieces = [slice(*pair) for pair in itertools.pairwise(bounds)]
    starts = torch.cat([torch.full((1, p.stop - p.start), p.start) for p in pieces], dim=1)
    with torch.no_grad():
        alone = torch.cat([module(tokens[:, piece]) for piece in pieces], dim=1)
        torch.testing.assert_close(module(tokens, starts=starts), alone, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(module(tokens), alone, atol=1e-4)


@pytest.mark.parametrize("autocast", [True, False])
def test_grouped_experts_compute_what_transformers_computes_one_by_one(autocast: bool) -> None:
    model = built(foreign_config(ARCHITECTURES["mixtral"])).eval()
    tokens = torch.randint(260, (2, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for way in ("grouped_mm", "eager"):
        model.causal.config._experts_implementation = way
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(model(tokens))
    assert torch.equal(*found)


def test_adapters_are_beside_the_layers_that_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "falcon_h1")
    for targets, layers in (
        ("qkv,proj", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("o_proj,gate_proj", {"o_proj", "gate_proj"}),
    ):
        model = resolved(path, lora_rank=2, lora_targets=targets, random_base=True)
        assert {n.split(".")[-2] for n in trained_shapes(model)} == layers
        counted = sum(math.prod(shape) for shape in trained_shapes(model).values())
        assert model.trained_parameter_count == counted
        assert model.parameter_count == sum(map(math.prod, parameter_shapes(model).values()))
    path = written(tmp_path, "mamba2")
    with pytest.raises(UserError, match="computes with the weight of out_proj itself"):
        resolved(path, lora_rank=2, lora_targets="in_proj,out_proj", random_base=True)
    assert resolved(path, lora_rank=2, lora_targets="in_proj", random_base=True).lora is not None


def test_a_checkpoint_from_before_key_heads_were_recorded_holds_the_same_model() -> None:
    config = foreign_config(ARCHITECTURES["gemma2"])
    assert config.kv_heads == 2
    assert replace(config, kv_heads=None).computes() == config.computes()


def test_blocks_may_send_a_token_to_different_numbers_of_experts() -> None:
    """As Hunyuan-A13B's config.json, which has an entry for each block."""
    kind = {"model_type": "hunyuan_v1_moe", "head_dim": 8, "num_experts": 4}
    config = foreign_config({**ARCHITECTURES["llama"], **kind, "moe_topk": [2, 1]})
    assert config.idle_parameters == (2 + 3) * 3 * 32 * 48


def test_experts_go_by_the_names_of_their_config() -> None:
    """As Aria's config.json, whose experts all counted as in work."""
    kind = {"model_type": "aria_text", "head_dim": 8, "moe_num_experts": 4, "moe_topk": 1}
    config = foreign_config({**ARCHITECTURES["llama"], **kind})
    assert config.idle_parameters == 2 * 3 * 3 * 32 * 48


def test_heads_of_latent_attention_are_as_wide_as_what_they_compute() -> None:
    """Scores of 24 elements, 8 of them rotary, and sums of 16; `head_dim` is that of the 8."""
    widths = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kinds = {"model_type": "deepseek_v2", "q_lora_rank": None, "first_k_dense_replace": 1}
    config = foreign_config({**ARCHITECTURES["llama"], **kinds, **widths, **experts})
    assert config.head_size == (24 + 16) // 2
    assert config.attention_dim == config.heads * 20
    assert replace(config, head_dim=8).computes() == config.computes()


def test_blocks_without_a_linear_have_no_adapters() -> None:
    lora = Lora(rank=2, alpha=4)
    with pytest.raises(ValueError, match="FalconForCausalLM have no nn"):
        foreign_config(MORE["falcon"], lora=lora)


def test_a_config_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        resolved(tmp_path / "nothing" / "config.json")
    with pytest.raises(UserError, match="run `hf download nobody/nothing"):
        resolved("hf:nobody/nothing")
    with pytest.raises(UserError, match="names no model"):
        resolved("hf:nobody/--")
    with pytest.raises(UserError, match="--decoder own chooses"):
        resolved("nano", decoder="own")
    written(tmp_path, "llama")
    with pytest.raises(UserError, match="leave --model out"):
        parse_run_config(["--model", "hf:a/b", "--init-from", str(tmp_path)])


def test_the_adapters_of_a_run_of_transformers_decoder_are_continued(tmp_path: Path) -> None:
    config = written(tmp_path, "gemma2")
    (tmp_path / "run").mkdir()
    text = f"model: {config}\ndecoder: transformers\nlora_rank: 2\nlora_targets: q_proj,k_proj\n"
    (tmp_path / "run" / "config.yaml").write_text(text)
    continued = parse_run_config(["--init-from", str(tmp_path / "run")]).model
    assert (continued.lora_rank, continued.lora_targets) == (2, "k_proj,q_proj")


def test_tokens_per_expert_are_counted_once_per_step() -> None:
    counts = torch.tensor([[4.0, 4.0, 4.0, 4.0], [8.0, 8.0, 0.0, 0.0]])
    assert load_of(counts).tolist() == pytest.approx([0.0, 2.0, (1.0 + 0.5) / 2])
    module = built(foreign_config(ARCHITECTURES["mixtral"]))
    routing = Routing.of(module)
    assert routing is not None
    tokens = torch.randint(260, (2, 17))
    module(tokens[:, :-1], tokens[:, 1:])
    found = routing.take()
    assert found is not None
    assert found.sum(dim=1).tolist() == [64.0, 64.0]  # 32 tokens to two of four experts
    module.eval()(tokens[:, :-1], tokens[:, 1:])
    assert routing.take() is None
    assert Routing.of(built(foreign_config(ARCHITECTURES["phi3"]))) is None
