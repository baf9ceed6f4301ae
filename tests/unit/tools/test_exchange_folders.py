"""Folders of Llama-like models: shards, types, what lies beside the weights, what is refused."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.checkpoint import Checkpoint, Checkpointer
from launcher.checkpoint.index import CHUNK_ELEMENTS, ELEMENT_BYTES
from launcher.checkpoint.pretrained.source import TransformersWeights
from launcher.config.arguments import parse_run_config
from launcher.config.families import read_hf_config
from launcher.data.files import template_files
from launcher.data.tokenizer import load_encoder, train_bpe
from launcher.measure.live_trace import LiveTrace
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.parallel.world import start
from launcher.run.prepare import prepare
from launcher.run.resume import open_folder
from launcher.strategies.native import NativeEngine
from launcher.tools.exchange import export_cli, import_cli
from launcher.tools.prune import prune_cli
from launcher.util.errors import UserError

transformers = pytest.importorskip("transformers")

TEXT = "\n\n".join(f"Paragraph {n} says {n * n} times little." for n in range(300))
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
COMPANIONS = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
SHAPE: dict[str, Any] = {
    **{"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "vocab_size": 300},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    **{"max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": [0, 7]},
}
Q, GATE = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in several files, with a tokenizer and a chat template; not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "llama"
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model.generation_config.update(do_sample=True, temperature=0.7)
    model.save_pretrained(folder, max_shard_size="12KB")
    train_bpe([TEXT], 290).save(folder.parent / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder.parent / "tokenizer.json"),
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>"),
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return Path(shutil.copytree(saved, tmp_path / "llama"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def run(verb: Callable[[list[str]], int], *arguments: object) -> None:
    assert verb([str(argument) for argument in arguments]) == 0


def refusal(
    capsys: pytest.CaptureFixture[str], verb: Callable[[list[str]], int], *arguments: object
) -> str:
    """Return the message for bad input: one sentence on one line, exit code 2."""
    capsys.readouterr()
    assert verb([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("shardscale: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_shards_come_in_and_go_out(saved: Path, tmp_path: Path) -> None:
    assert len(list(saved.glob("*.safetensors"))) > 2
    run(import_cli.main, saved, "--out", tmp_path / "run")
    run(export_cli.main, tmp_path / "run", "--out", tmp_path / "out", "--shard-size", "9KB")
    files = sorted(tmp_path.glob("out/*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = {file.name: load_file(file) for file in files}
    assert index["weight_map"] == {name: file for file, found in held.items() for name in found}
    sizes = [sum(tensor.nbytes for tensor in found.values()) for found in held.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    # The embedding is larger than a file may be, and alone in its own.
    assert [size > 9000 for size in sizes] == [len(found) == 1 for found in held.values()]
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    before, after = weights_of(saved), weights_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values())
    assert theirs.generation_config.eos_token_id == [0, 7]


def test_an_import_goes_out_in_the_dtype_that_it_came_in(folder: Path, tmp_path: Path) -> None:
    """As imported, pruned, or resumed, though its folder may be gone by then."""
    run(export_cli.main, _imported(folder, tmp_path / "fp32"), "--out", tmp_path / "fp32-out")
    assert _dtypes(tmp_path / "fp32-out") == {torch.float32}
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    bf16 = _imported(folder, tmp_path / "bf16")
    run(prune_cli.main, f"hf:{folder}", "--out", tmp_path / "pruned", "--data=none", "--device=cpu")
    run(prune_cli.main, bf16, "--out", tmp_path / "again", "--data=none", "--device=cpu")
    shutil.rmtree(folder)
    for number, name in enumerate(("bf16", "pruned", "again")):
        out = tmp_path / f"out-{number}"
        run(export_cli.main, tmp_path / name, "--out", out)
        assert _dtypes(out) == {torch.bfloat16}


def _imported(folder: Path, out: Path) -> Path:
    run(import_cli.main, folder, "--out", out)
    return out


def _dtypes(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in weights_of(folder).values()}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_comes_in_exactly_and_goes_out(
    dtype: str, saved: Path, tmp_path: Path
) -> None:
    run(import_cli.main, saved, "--out", tmp_path / "run")
    low, again = tmp_path / "low", tmp_path / "again"
    run(export_cli.main, tmp_path / "run", "--out", low, "--dtype", dtype)
    run(import_cli.main, low, "--out", tmp_path / "from-low")
    run(export_cli.main, tmp_path / "from-low", "--out", again)
    rounded, whole, first = weights_of(low), weights_of(again), weights_of(saved)
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for name, tensor in first.items():
        assert torch.equal(rounded[name], tensor.to(torch_dtype))
        assert torch.equal(whole[name], rounded[name].float())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(low)
    assert theirs.dtype == torch_dtype


def opened_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Path:
    """The folder of a training run that begins."""
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    common = ["--steps=1", "--micro-batch=1", "--device=cpu", f"--data={tmp_path / 'text.txt'}"]
    argv = [*common, f"--out={tmp_path / 'run'}", *flags]
    prepared = prepare(argv, world_size=1, ranks_per_node=1)
    tokenizer_file, world = (
        prepared.corpus.tokenizer_path,
        start("cpu", timeout_s=60.0, needs_group=False),
    )
    return open_folder(prepared.resolved, tokenizer_file, prepared.resume, world)[0].path


def test_what_lies_beside_the_weights_comes_back_out_of_a_run(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an import into the folder of the run that trains it, and out of that one."""
    start_folder = tmp_path / "start"
    run(import_cli.main, saved, "--out", start_folder)
    flags = (f"--config={start_folder / 'config.yaml'}", f"--resume={start_folder}")
    trained = opened_run(tmp_path, monkeypatch, *flags)
    shutil.copytree(start_folder / "checkpoints", trained / "checkpoints")
    run(export_cli.main, trained, "--out", tmp_path / "out")
    for name in COMPANIONS:
        assert (tmp_path / "out" / name).read_bytes() == (saved / name).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    assert tokenizer(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    message = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "hello\n"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, [0, 7])


def test_another_tokenizer_brings_its_own_end(saved: Path, tmp_path: Path) -> None:
    run(import_cli.main, saved, "--out", tmp_path / "run")
    run(export_cli.main, tmp_path / "run", "--out", tmp_path / "out", "--tokenizer", "byte")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 256


def test_the_printed_command_can_be_pasted(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a run"
    run(import_cli.main, saved, "--out", out)
    assert f"--resume '{out}' --data FILE" in capsys.readouterr().out


def test_templates_of_other_names_come_in_and_go_out(folder: Path, tmp_path: Path) -> None:
    """transformers 5 saves that of calls in a folder of its own, and renders with it."""
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(f"TOOLS {CHAT}")
    assert more / "tool_use.jinja" in template_files(str(folder / "tokenizer.json"))
    run(import_cli.main, folder, "--out", tmp_path / "run")
    run(export_cli.main, tmp_path / "run", "--out", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.chat_template == {"default": CHAT, "tool_use": f"TOOLS {CHAT}"}


def test_sentencepieces_model_comes_in_and_goes_out(folder: Path, tmp_path: Path) -> None:
    """llama.cpp's converter and others look for it first."""
    (folder / "tokenizer.model").write_bytes(b"pieces")
    run(import_cli.main, folder, "--out", tmp_path / "run")
    run(export_cli.main, tmp_path / "run", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"pieces"


@pytest.mark.parametrize(
    ("verb", "flags"), [(import_cli.main, []), (prune_cli.main, ["--data=none", "--device=cpu"])]
)
def test_a_tokenizer_of_older_files_is_kept(
    verb: Any, flags: list[str], folder: Path, tmp_path: Path
) -> None:
    """The folder that it came from may be gone by the time that the run is used."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in model["merges"]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    expected = transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    named = parse_run_config([f"--init-from={folder}"]).data.tokenizer
    assert load_encoder(named).encode([TEXT])[0] == expected
    run(verb, folder, "--out", tmp_path / "run", *flags)
    shutil.rmtree(folder)
    run(export_cli.main, tmp_path / "run", "--out", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == expected


def test_a_tokenizer_of_sentencepiece_is_not_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders before tokenizer.json have no other; the import had none, and no word of it."""
    older = tmp_path / "older"
    shutil.copytree(folder, older, ignore=shutil.ignore_patterns("*tokenizer*", "*.jinja"))
    (older / "tokenizer.model").write_bytes(b"\x0a\x0e")
    assert import_cli.main([str(older), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"tokenizer hf:{older} " in said
    if importlib.util.find_spec("sentencepiece") is None:
        assert said.endswith("needs the library sentencepiece: pip install sentencepiece\n")


def test_the_end_of_a_turn_ends_a_text_of_an_export(folder: Path, tmp_path: Path) -> None:
    """A base model's generation config does not name it, and what has learned it would run on."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 7}))
    template = CHAT.replace("}}", "}}<|endoftext|>")
    (folder / "chat_template.jinja").write_text(template)
    run(import_cli.main, folder, "--out", tmp_path / "run")
    run(export_cli.main, tmp_path / "run", "--out", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.generation_config.eos_token_id == [7, 0]


def test_ends_of_text_that_stand_only_in_config_json_are_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").unlink()
    run(import_cli.main, folder, "--out", tmp_path / "run")
    run(export_cli.main, tmp_path / "run", "--out", tmp_path / "out", "--tokenizer=none")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (0, [0, 7])


def test_a_run_that_begins_with_a_folder_knows_its_ends_of_text(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of an older folder, which has none of the small files but tokenizer.json."""
    for name in COMPANIONS:
        (folder / name).unlink()
    trained = opened_run(tmp_path, monkeypatch, f"--init-from={folder}")
    generation = json.loads((trained / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (0, [0, 7])


def test_an_import_holds_pieces_only(tmp_path: Path) -> None:
    """Its 25 MB in 16 bits are 50 in the checkpoint, and 150 with the optimizer's."""
    shape = SHAPE | {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 256 * 1024}
    config = transformers.LlamaConfig(**shape)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "hf")
    with LiveTrace() as trace:
        run(import_cli.main, tmp_path / "hf", "--out", tmp_path / "run")
    zeros_bytes = ELEMENT_BYTES * 2 * 16 * 256 * 1024  # pages that nobody writes to
    mapped_bytes = (tmp_path / "hf" / "model.safetensors").stat().st_size
    largest_bytes = zeros_bytes + mapped_bytes + 3 * ELEMENT_BYTES * CHUNK_ELEMENTS
    assert mapped_bytes < trace.peak_bytes() < largest_bytes


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "bloom"}, "model_type is 'bloom', and only gpt2, llama, mistral, qwen2, qwen3"),
    ({"model_type": ["llama"]}, "model_type is ['llama'], and only"),
    ({"auto_map": {"AutoModel": "m.M"}}, "auto_map is {'AutoModel': 'm.M'}, code that"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and shardscale's model has only silu"),
    ({"attention_bias": "no"}, "attention_bias is 'no', but must be true or false"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1, and shardscale's model computes only"),
    ({"pretraining_tp": 2}, "pretraining_tp is 2, and shardscale's model computes only 1"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and shardscale's model turns"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, and shardscale's"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0, and shardscale's llama has no"),
    ({"layer_types": ["full_attention"] * 2}, "layer_types is ['full_attention', 'full_attent"),
    ({"num_key_value_heads": 3}, "3 kv_heads do not divide 4 heads"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0, and shardscale's models have 1 to"),
    ({"head_dim": 5}, "position rope turns pairs, and a head of 5 is odd"),
    ({"hidden_size": None}, "hidden_size is None, but must be a whole number"),
    ({"hidden_size": 20.5}, "hidden_size is 20.5, but must be a whole number"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000000000..., of 401 digits"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
    ({"is_causal": False}, "is_causal is False, and shardscale's model computes only True"),
    ({"rope_parameters": None, "rope_theta": "1e4"}, "rope_theta is '1e4', but must be a number"),
    ({"rope_parameters": [1]}, "rope_parameters is [1], and not an object"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.rope_type is 'linear', and"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type is 'yarn', and shardscale's"),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type is 'dynamic', and"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type is 'longrope', and"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor is None, but must be a num"),
    ({"rope_scaling": {"mrope_section": [1]}}, "rope_scaling.mrope_section is [1], which shard"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 9}}}, "full_attention is {'rope_theta'"),
]
QWEN = {"model_type": "qwen2", "layer_types": None}
MIXED = ["full_attention", "sliding_attention"]
CONFIGS += [
    (QWEN | {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers is 1, with"),
    (QWEN | {"use_sliding_window": True, "layer_types": MIXED}, "layer_types is ['full_attention'"),
    (QWEN | {"layer_types": MIXED[1:] * 2}, "with use_sliding_window False, and ours has one"),
    (QWEN | {"layer_types": ["linear_attention"]}, "layer_types is ['linear_attention'], and only"),
    (QWEN | {"use_mrope": True}, "use_mrope is True, and shardscale's model computes only False"),
    ({"model_type": "qwen3", "head_dim": None}, "head_dim is None, but must be a whole number"),
    ({"model_type": "mistral", "sliding_window": 1}, "window 0 is outside 1 to the context of 32"),
    ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window is 'all', but must be a"),
]


@pytest.mark.parametrize(("changes", "said"), CONFIGS, ids=range(len(CONFIGS)))
def test_a_config_that_is_not_ours_is_refused(
    changes: dict[str, Any], said: str, saved: Path, tmp_path: Path
) -> None:
    document = json.loads((saved / "config.json").read_text())
    for name in ("attention_bias", "mlp_bias", "pretraining_tp"):
        if changes.get("model_type", "llama") != "llama":
            del document[name]
    (tmp_path / "config.json").write_text(json.dumps(document | changes))
    with pytest.raises(UserError) as caught:
        read_hf_config(tmp_path / "config.json")
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral"}, None),  # 4096 hide nothing of 32
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 31}, 30),
        ({"model_type": "mistral", "sliding_window": 32}, None),
        (QWEN | {"sliding_window": 8}, None),
        (QWEN | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, None),
        (QWEN | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 7),
    ],
)
def test_a_window_is_what_it_hides(
    changes: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | changes))
    assert read_hf_config(tmp_path).window == window


@pytest.mark.parametrize("flag", ["--model", "--init-from"])
@pytest.mark.parametrize(
    ("sliding", "context", "window"),
    [(16, 8, None), (16, 16, None), (16, 24, 15), (16, 64, 15), (32, 64, 31), (48, 64, 47)],
)
def test_a_window_at_another_context_is_what_it_hides_there(
    flag: str, sliding: int, context: int, window: int | None, tmp_path: Path
) -> None:
    """Its own context is 32, where a window of 32 hides nothing."""
    document = SHAPE | {"model_type": "mistral", "sliding_window": sliding}
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = parse_run_config([f"{flag}={tmp_path}", f"--context={context}"])
    assert (built := config.model.build()).window == window
    assert built.context == context
    config = parse_run_config([f"{flag}={tmp_path}", f"--context={context}", "--window=5"])
    assert config.model.build().window == 5


@pytest.mark.parametrize(("context", "window"), [(8, None), (64, 16)])
def test_a_runs_window_at_another_context(context: int, window: int | None, tmp_path: Path) -> None:
    shape = "{layers: 1, heads: 2, d_model: 16, position: rope, context: 32, window: 16}"
    (tmp_path / "config.yaml").write_text(shape)
    config = parse_run_config([f"--init-from={tmp_path}", f"--context={context}"])
    assert config.model.build().window == window


def test_a_window_that_was_hidden_at_import_is_not_lost_at_a_longer_context(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = SHAPE | {"model_type": "mistral", "sliding_window": 40}
    (folder / "config.json").write_text(json.dumps(document))
    run = tmp_path / "run"
    assert import_cli.main([str(folder), "--out", str(run)]) == 0
    (tmp_path / "text.txt").write_text(TEXT)
    flags = [f"--config={run / 'config.yaml'}", f"--resume={run}", "--device=cpu", "--seq-len=16"]
    flags += [f"--data={tmp_path / 'text.txt'}", "--steps=1", f"--out={tmp_path / 'on'}"]
    alone = partial(prepare, world_size=1, ranks_per_node=1)
    assert alone(flags).resolved.model.window is None
    with pytest.raises(UserError, match="hides nothing at its --context 32, and does at 64: give"):
        alone([*flags, "--context=64"])
    assert alone([*flags, "--context=64", "--window=39"]).resolved.model.window == 39
    assert alone([*flags, "--context=40"]).resolved.model.window is None


def test_a_folder_here_needs_no_slash_to_be_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "nano"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SHAPE | {"model_type": "llama"}))
    assert parse_run_config(["--model=mine"]).model.build().context == 32
    assert parse_run_config(["--model=nano"]).model.build().context == 128
    assert parse_run_config(["--model=./nano"]).model.build().context == 32


def test_gpt2_takes_another_context(tmp_path: Path) -> None:
    """Its config.json has another word for it."""
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **shape}))
    assert parse_run_config([f"--model={tmp_path}", "--context=64"]).model.build().context == 64


def test_older_words_for_rotary_frequencies(tmp_path: Path) -> None:
    """transformers 4 wrote `rope_theta`, and `rope_scaling` with what stretches them."""
    scaling = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    document = SHAPE | {"model_type": "llama", "rope_theta": 500000, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = read_hf_config(tmp_path)
    assert (config.rope_theta, config.rope_scaling) == (500_000.0, (8.0, 1.0, 4.0, 32.0))


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., str]:
    """Spoils one tensor, wherever it is."""

    def spoil(folder: Path) -> str:
        path = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
        tensors = load_file(path)
        tensor = change(tensors.pop(name).clone())
        save_file(tensors | ({} if tensor is None else {name: tensor}), path, {"format": "pt"})
        return path.name

    return spoil


def set_to(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(value))


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def one_more(folder: Path) -> None:
    save_file(load_file(shard(folder)) | {"score.weight": torch.ones(2)}, shard(folder))


def elsewhere(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][Q] = "../../secret.safetensors"
    path.write_text(json.dumps(index))


def config_json(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def custom_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": 1}}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: shard(folder).unlink(), "there is no such file"),
        (lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:-8]), "cannot be re"),
        (lambda folder: shard(folder).write_bytes(b"<html>404"), "cannot be read as safetensors"),
        (elsewhere, "names '../../secret.safetensors', which is no safetensors file of this fol"),
        (one_more, "score.weight belongs to no LlamaForCausalLM of shardscale"),
        (changed(Q, lambda tensor: None), f"has no tensor {Q}, which its config.json asks for"),
        (changed(Q, lambda tensor: tensor[:-1].clone()), f"{Q} is [23, 20], but config.json makes"),
        (changed(Q, lambda tensor: tensor.to(torch.int8)), f"{Q} is stored as I8"),
        (changed(Q, set_to(float("nan"))), f"{Q}: has values that are NaN or infinite"),
        (changed(GATE, set_to(float("inf"))), f"{GATE}: has values that are NaN or infinite"),
        (lambda folder: config_json(folder, num_hidden_layers=1), "the weights have 2 blocks, and"),
        (
            lambda folder: config_json(folder, num_hidden_layers=3),
            "has no tensor model.layers.2.",
        ),
        (lambda folder: config_json(folder, tie_word_embeddings=True), "lm_head.weight differs fr"),
        (lambda folder: config_json(folder, head_dim=8), f"{Q.replace('1', '0')} is [24, 20], but"),
        (lambda folder: config_json(folder, logit_scale=0.5), "logit_scale is 0.5, and shardscale"),
        (
            lambda folder: config_json(folder, vocab_size=301),
            "embed_tokens.weight is [300, 20]",
        ),
        (custom_tokenizer, "tokenizer_config.json: auto_map names code that comes with the token"),
    ],
)
def test_a_folder_that_is_damaged_is_refused_and_nothing_is_written(
    spoil: Callable[[Path], object],
    said: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(folder)
    assert said in refusal(capsys, import_cli.main, folder, "--out", folder.parent / "run")
    assert list(folder.parent.iterdir()) == [folder]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_bpe([TEXT], 320).save(folder / "tokenizer.json")
    said = refusal(capsys, import_cli.main, folder, "--out", folder.parent / "run")
    assert "tokenizer.json: token id" in said
    assert "is beyond the vocabulary of 300: set the model's vocabulary size to" in said
    assert "or more (of stored weights by resize_token_embeddings of transformers)" in said
    assert list(folder.parent.iterdir()) == [folder]


def test_what_older_versions_have_saved_with_the_weights(folder: Path) -> None:
    with TransformersWeights(folder) as source:
        expected = {name: source.read(name) for name in source.shapes}
    frequencies = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(2)}
    tensors = load_file(shard(folder)) | {name: torch.ones(3) for name in frequencies}
    save_file(tensors, shard(folder))
    with TransformersWeights(folder) as source:
        assert all(torch.equal(source.read(name), value) for name, value in expected.items())


def random_run(folder: Path, **changes: Any) -> GPT:
    shape: dict[str, Any] = {"vocab_size": 30, "context": 8, "layers": 1, "heads": 2, "d_model": 8}
    config = ModelConfig(**{**shape, **changes})
    module = GPT(config)
    optimizer = torch.optim.AdamW(module.parameters())
    engine = NativeEngine(module, optimizer, accumulation=1, clip=0.0, device=torch.device("cpu"))
    with torch.no_grad():
        module.wte.weight[3, 3] = 1e5
    extra = {"config": {"tokenizer": "byte"}, "model": config}
    Checkpointer(folder / "checkpoints").save(1, engine, extra)
    return module


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        (
            {"position": "rope", "activation": "swiglu"},
            [],
            "norm layer: transformers has no such model (LlamaForCausalLM, the nearest, has norm r",
        ),
        (
            {"qk_norm": True, "norm": "rms", "position": "rope", "activation": "relu"}
            | {"bias": "none"},
            [],
            "activation relu: transformers has no such model (Qwen3ForCausalLM, the nearest, has a",
        ),
        ({}, ["--dtype=fp16"], "--dtype fp16: transformer.wte.weight has values beyond 65504; use"),
        ({}, ["--shard-size=huge"], "--shard-size 'huge' is not a size"),
        ({}, ["--cache"], "--cache belongs to --format onnx or tensorrt, not hf: leave it out"),
        ({}, ["--no-cache"], "--no-cache belongs to --format onnx or tensorrt, not hf"),
        (
            {},
            ["--format=safetensors", "--shard-size=100B"],
            "--shard-size 100B belongs to --format hf, not safetensors",
        ),
        ({}, ["--dtype=int8"], "--dtype"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    changes: dict[str, Any],
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    random_run(tmp_path / "run", **changes)
    none = () if "--format=safetensors" in arguments else ("--tokenizer=none",)
    out = ("--out", tmp_path / "out", *none)
    assert said in refusal(capsys, export_cli.main, tmp_path / "run", *out, *arguments)
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_what_no_family_has_goes_out_under_our_names_and_whole(tmp_path: Path) -> None:
    random_run(tmp_path / "run", position="rope", activation="swiglu")
    out = tmp_path / "out"
    run(export_cli.main, tmp_path / "run", "--out", out, "--format=safetensors")
    shapes = Checkpoint.open(tmp_path / "run" / "checkpoints" / "step-00000001").shapes
    assert load_file(out / "model.safetensors").keys() == shapes.keys()
