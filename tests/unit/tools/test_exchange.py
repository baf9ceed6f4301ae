"""Export and import: the same tensors, the same loss and the same token ids as transformers."""

import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from launcher.checkpoint import Checkpoint, Checkpointer
from launcher.checkpoint.index import CHUNK_ELEMENTS, ELEMENT_BYTES
from launcher.checkpoint.pretrained import stored
from launcher.checkpoint.rank_files import RangeReader
from launcher.data.tokenizer import ByteEncoder, load_encoder, train_bpe
from launcher.measure.live_trace import LiveTrace
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.engine import train_step
from launcher.strategies.native import NativeEngine
from launcher.tools.exchange import export_cli, import_cli
from launcher.util.files import run_folder_of

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "launcher" / "train.py").read_text(encoding="utf-8") + "\n\té 中 🙂 <|endoftext|>"
SHAPE: dict[str, Any] = {"vocab_size": 300, "context": 32, "layers": 2, "heads": 2, "d_model": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "untied": {"tied": False, "bias": "none", "d_ff": 24},
    "relu": {"activation": "relu", "bias": "mlp", "dropout": 0.1},
}


def trained(folder: Path, **changes: Any) -> NativeEngine:
    """A run folder with a checkpoint after 3 steps, and the engine that it was saved from."""
    settings = {**SHAPE, **changes}
    torch.manual_seed(0)
    engine = new_engine(ModelConfig(**settings))
    for tokens in torch.randint(300, (3, 2, 33)):
        train_step(engine, [(tokens[:, :-1], tokens[:, 1:])], 1e-2)
    extra = {"config": {"model": "nano", "tokenizer": "bpe", **settings}}
    Checkpointer(folder / "checkpoints").save(3, engine, extra)
    return engine


def new_engine(config: ModelConfig) -> NativeEngine:
    module = GPT(config)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    return NativeEngine(module, optimizer, accumulation=1, clip=0.0, device=torch.device("cpu"))


def run(*arguments: object) -> int:
    verb, *rest = map(str, arguments)
    return {"export": export_cli.main, "import": import_cli.main}[verb](rest)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the message for bad input: one line, exit code 2."""
    capsys.readouterr()
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("shardscale: ")
    assert printed.err.count("\n") == 1
    return printed.err


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its tokenizer; not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    trained(folder)
    train_bpe([TEXT], 300).save(folder / "tokenizer.json")
    return folder


@pytest.fixture
def exported(finished: Path, tmp_path: Path) -> Path:
    assert run("export", finished, "--out", tmp_path / "hf") == 0
    return tmp_path / "hf"


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_and_a_resumed_import_have_our_loss(variant: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    engine = trained(tmp_path / "run", **VARIANTS[variant])
    hf = tmp_path / "hf"
    assert run("export", tmp_path / "run", "--out", hf, "--tokenizer", "byte") == 0
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(hf, output_loading_info=True)
    assert not any(report.values())
    assert (theirs.config.eos_token_id, theirs.generation_config.eos_token_id) == (256, 256)
    tokens = torch.from_numpy(np.asarray(ByteEncoder().encode([TEXT])[0][:320], np.int64))
    tokens = tokens.view(10, 32)
    with torch.no_grad():
        expected = float(theirs.eval()(tokens, labels=tokens).loss)
    assert loss_of(engine, tokens) == pytest.approx(expected, abs=1e-5)

    assert run("import", hf, "--out", tmp_path / "imported") == 0
    settings = yaml.safe_load((tmp_path / "imported" / "config.yaml").read_text())
    assert settings.pop("tokenizer") == str(tmp_path / "imported" / "tokenizer.json")
    assert settings.pop("model") == "custom"
    assert settings["dropout"] == VARIANTS[variant].get("dropout", 0.0)
    fresh = new_engine(ModelConfig(**settings))
    imported = tmp_path / "imported"
    loaded, _ = Checkpointer(imported / "checkpoints").load(imported, fresh)
    assert loaded.step == 0
    assert loss_of(fresh, tokens) == pytest.approx(expected, abs=1e-5)
    for state in fresh._optimizer.state.values():
        assert not any(value.any() for value in state.values())


def loss_of(engine: NativeEngine, tokens: torch.Tensor) -> float:
    """Without dropout; the mean over all targets."""
    with torch.no_grad():
        return float(engine._module.eval()(tokens[:, :-1], tokens[:, 1:].contiguous()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back_every_bit_is_the_same(variant: str, tmp_path: Path) -> None:
    trained(tmp_path / "run", **VARIANTS[variant])
    first, second = tmp_path / "first", tmp_path / "second"
    assert run("export", tmp_path / "run", "--out", first, "--tokenizer", "none") == 0
    assert run("import", first, "--out", tmp_path / "imported") == 0
    assert run("export", tmp_path / "imported", "--out", second, "--tokenizer", "none") == 0
    before, after = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((first / "config.json").read_text())["eos_token_id"] is None
    assert not (first / "tokenizer.json").exists()


def test_the_tokenizer_gives_the_same_ids(exported: Path, finished: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = load_encoder(str(finished / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert theirs(TEXT)["input_ids"] == ours.encode([TEXT])[0]
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    assert (theirs.eos_token_id, theirs.model_max_length) == (ours.end_of_text, 32)


def test_the_byte_tokenizer_gives_the_same_ids(finished: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert run("export", finished, "--out", tmp_path / "hf", "--tokenizer", "byte") == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = TEXT.removesuffix("<|endoftext|>")
    assert theirs(text)["input_ids"] == list(text.encode())
    assert theirs.eos_token_id == 256


ASK = """
import json, sys, torch, transformers
folder, text = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
inputs = tokenizer(text, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits
    made = model.generate(**inputs, max_new_tokens=4, do_sample=False)
ends = (model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id)
found = {"ids": inputs["input_ids"].tolist(), "logits": logits.tolist(), "made": made.tolist()}
print(json.dumps(found | {"inputs": sorted(inputs), "ends": ends}))
"""
# Other versions of transformers, each an interpreter that has one (and torch), to be tried as well.
OTHERS = os.environ.get("SHARDSCALE_TEST_TRANSFORMERS", "").split()


@pytest.mark.parametrize("interpreter", ["this", *OTHERS])
def test_a_user_of_transformers_gets_our_logits(
    interpreter: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`model(**tokenizer(text))`, from the oldest version to the newest that the extra allows."""
    pytest.importorskip("transformers")
    engine = trained(tmp_path / "run")
    folder = tmp_path / "hf"
    assert run("export", tmp_path / "run", "--out", folder, "--tokenizer", "byte") == 0
    capsys.readouterr()
    arguments = [str(folder), "def main()"]
    if interpreter == "this":  # which has imported all of it already
        monkeypatch.setattr(sys, "argv", ["ask", *arguments])
        exec(ASK, {})
    else:
        command = [interpreter, "-W", "ignore", "-c", ASK, *arguments]
        print(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    answers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = json.loads(answers[-1])
    assert found["ids"] == [list(b"def main()")]
    assert found["inputs"] == ["attention_mask", "input_ids"]
    assert found["ends"] == [256, 256, 256]
    module = engine._module.eval()
    tokens = torch.tensor(found["ids"])
    with torch.no_grad():
        ours = module(tokens)
        assert torch.allclose(torch.tensor(found["logits"]), ours, atol=1e-5)
        for _ in range(4):
            following = module(tokens)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], dim=1)
    assert found["made"] == tokens.tolist()


def test_what_older_versions_ask_of_the_files(exported: Path) -> None:
    """Versions that are not installed here read these names (4.55 as well as 5)."""
    tokenizer = json.loads((exported / "tokenizer_config.json").read_text())
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    config = json.loads((exported / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]


def test_an_imported_model_without_a_tokenizer_is_exported_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    assert run("export", tmp_path / "run", "--out", tmp_path / "hf", "--tokenizer", "none") == 0
    assert run("import", tmp_path / "hf", "--out", tmp_path / "imported") == 0
    capsys.readouterr()
    assert run("export", tmp_path / "imported", "--out", tmp_path / "again") == 0
    assert "step 0; 11,904 parameters" in (said := capsys.readouterr().out), said
    assert said.rstrip().endswith("no tokenizer")


def save_steps(folder: Path, *steps: int, of: int) -> None:
    engine = new_engine(ModelConfig(**SHAPE))
    extra = {"config": {"model": "nano", "tokenizer": "byte", **SHAPE}, "steps": of}
    for step in steps:
        Checkpointer(folder / "checkpoints").save(step, engine, extra)


@pytest.mark.parametrize(
    ("run_of", "recorded", "exports", "said"),
    [
        ("run", 300, "", "step 300 of 300;"),
        ("run", 300, "checkpoints/step-00000189", "step 189 of 300; a newer checkpoint exists"),
        ("preempted", 189, "", "step 189 of 300; the run is not complete"),
        ("preempted", 0, "", "step 189 of 300; the run is not complete"),
        ("preempted", 300, "", "step 189 of 300; the run went on to step 300, "),
    ],
)
def test_export_says_which_step_it_takes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run_of: str,
    recorded: int,
    exports: str,
    said: str,
) -> None:
    save_steps(tmp_path / "run", 189, *([300] if run_of == "run" else []), of=300)
    with (tmp_path / "run" / "rank0.jsonl").open("w") as file:
        for step in range(1, recorded + 1):
            file.write(json.dumps({"kind": "step", "step": step, "loss": 1.0}) + "\n")
        file.write('{"kind": "step", "step": 9')  # killed inside a line
    arguments = (tmp_path / "run" / exports, "--format", "safetensors")
    assert run("export", *arguments, "--out", tmp_path / "out") == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("owner", "moment"), [(stored, "saved_model"), (RangeReader, "read_into")])
def test_a_checkpoint_that_its_living_run_removes_is_not_damaged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    owner: Any,
    moment: str,
) -> None:
    """With `--keep 1` it goes when the next one is there: between its index and its tensors, or
    between two tensors."""
    folder = tmp_path / "run"
    save_steps(folder, 5, of=9)
    original = getattr(owner, moment)
    reads = itertools.count()

    def read(*arguments: Any) -> Any:
        if next(reads) == 0:
            save_steps(folder, 6, of=9)
            shutil.rmtree(folder / "checkpoints" / "step-00000005")
        return original(*arguments)

    monkeypatch.setattr(owner, moment, read)
    arguments = ("export", folder, "--format", "safetensors")
    assert run(*arguments, "--out", tmp_path / "out") == 0
    assert "step-00000006" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    gone = folder / "checkpoints" / "step-00000005"
    said = refusal(capsys, *arguments[:1], gone, *arguments[2:], "--out", tmp_path / "none")
    assert f"checkpoint {gone} is not there: never saved, or removed since" in said


def test_a_link_to_a_checkpoint_finds_its_run(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to(finished / "checkpoints" / "step-00000003")
    assert run("export", tmp_path / "best", "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()
    elsewhere = tmp_path / "run" / "checkpoints" / "step-00000003"  # moved to a larger disk
    elsewhere.parent.mkdir(parents=True)
    elsewhere.symlink_to(finished / "checkpoints" / "step-00000003")
    assert run_folder_of(tmp_path / "best") == finished
    assert run_folder_of(elsewhere) == tmp_path / "run"


def test_bare_weights_have_our_names(finished: Path, tmp_path: Path) -> None:
    arguments = ("export", finished / "checkpoints" / "step-00000003", "--format", "safetensors")
    assert run(*arguments, "--out", tmp_path / "fp32") == 0
    assert run(*arguments, "--out", tmp_path / "bf16", "--dtype", "bf16") == 0
    module = GPT(ModelConfig(**SHAPE))
    stored = load_file(tmp_path / "fp32" / "model.safetensors")
    module.load_state_dict(stored | {"head.weight": stored["wte.weight"]})
    assert module(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()
    rounded = load_file(tmp_path / "bf16" / "model.safetensors")
    assert all(torch.equal(rounded[name], stored[name].bfloat16()) for name in stored)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_fine_tune_goes_out_in_the_dtype_of_its_base(key: str, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "run"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({key: "bfloat16"}))
    engine = new_engine(ModelConfig(**SHAPE))
    extra = {"config": {**SHAPE, "tokenizer": "byte", "init_from": str(base)}}
    Checkpointer(folder / "checkpoints").save(0, engine, extra)
    assert run("export", folder, "--out", tmp_path / "own") == 0
    assert load_file(tmp_path / "own" / "model.safetensors")["transformer.wte.weight"].dtype == (
        torch.bfloat16
    )
    (base / "config.json").unlink()
    assert run("export", folder, "--out", tmp_path / "alone", "--format", "safetensors") == 0
    assert load_file(tmp_path / "alone" / "model.safetensors")["wte.weight"].dtype == torch.float32


def test_what_transformers_itself_has_saved_can_be_imported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 300, "n_positions": 32}
    shape |= {"bos_token_id": 0, "eos_token_id": 0}  # its own default is GPT-2's 50256
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    theirs.bfloat16().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    theirs.transformer.float().save_pretrained(tmp_path / "decoder")  # names without a prefix
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    weights = load_file(tmp_path / "decoder" / "model.safetensors")
    # The hub's gpt2 keeps its masks, and old versions kept the tied head too.
    weights["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    weights["lm_head.weight"] = weights["wte.weight"].clone()
    save_file(weights, tmp_path / "decoder" / "model.safetensors", metadata={"format": "pt"})
    exports = []
    for name in ("sharded", "decoder"):
        assert run("import", tmp_path / name, "--out", tmp_path / f"{name}-run") == 0
        settings = yaml.safe_load((tmp_path / f"{name}-run" / "config.yaml").read_text())
        assert settings["dropout"] == 0.1
        assert "tokenizer" not in settings
        out = tmp_path / f"{name}-out"
        assert run("export", tmp_path / f"{name}-run", "--out", out, "--tokenizer=none") == 0
        exports.append(load_file(out / "model.safetensors"))
    expected = theirs.state_dict()
    for weights in exports:
        assert all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bloom"}, "can be imported; --init-from with --decoder auto trains others"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"layer_norm_epsilon": "tiny"}, "layer_norm_epsilon is 'tiny', but must be a number"),
        ({"activation_function": "silu"}, "activation_function is 'silu'"),
        ({"activation_function": ["gelu"]}, "activation_function is ['gelu']"),
        ({"attn_pdrop": 0.2}, "attn_pdrop 0.2 differ"),
        ({"n_layer": "two"}, "n_layer is 'two', but must be a whole number"),
        ({"n_head": 3}, "3 heads do not divide d_model 16"),
        ({"n_layer": 3}, "has no tensor transformer.h.2.ln_1.weight"),
        ({"n_layer": 1}, "the weights have 2 blocks, and config.json says n_layer 1"),
        ({"vocab_size": 301}, "transformer.wte.weight is [300, 16], but config.json makes it [301"),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
    ],
)
def test_a_config_that_is_not_ours_is_refused(
    changes: dict[str, Any], said: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_json(exported / "config.json", **changes)
    out = exported.parent / "run"
    assert said in refusal(capsys, "import", exported, "--out", out)
    assert list(exported.parent.iterdir()) == [exported]


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch unpickled'\ntR.")


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def untied_in_truth(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def integers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["transformer.ln_f.bias"] = weights["transformer.ln_f.bias"].to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_value(value: float, dtype: torch.dtype) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        name = "transformer.h.1.mlp.c_fc.weight"
        weights[name] = weights[name].to(dtype)
        weights[name][3, 5] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def from_elsewhere(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.0.attn.lora"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def index(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        weight_map = {str(number): name for number, name in enumerate(names)}
        text = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    return write


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (only_a_pickle, "pytorch_model.bin: is a pickle"),
        (cut_off, "model.safetensors: cannot be read as safetensors"),
        (untied_in_truth, "lm_head.weight differs from transformer.wte.weight"),
        (integers, "transformer.ln_f.bias is stored as I8"),
        (with_value(float("nan"), torch.float32), "transformer.h.1.mlp.c_fc.weight: has values"),
        (with_value(float("inf"), torch.float16), "transformer.h.1.mlp.c_fc.weight: has values"),
        (with_value(float("-inf"), torch.bfloat16), "transformer.h.1.mlp.c_fc.weight: has values"),
        (from_elsewhere, "transformer.h.0.attn.lora belongs to no GPT2LMHeadModel"),
        (index("pytorch_model-1.bin"), "names 'pytorch_model-1.bin'"),
        (index("../model.safetensors"), "names '../model.safetensors'"),
        (index("gone.safetensors"), "gone.safetensors: there is no such file"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: there is no such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (
            lambda folder: (folder / "config.json").write_text("[]"),
            "holds [], but must be a JSON object",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds neither"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be"),
    ],
)
def test_damaged_folders_are_refused(
    spoil: Callable[[Path], None],
    said: str,
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(exported.parent)
    spoil(exported)
    assert said in refusal(capsys, "import", exported, "--out", "run")
    assert list(exported.parent.iterdir()) == [exported]


def test_a_damaged_checkpoint_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    path = next(tmp_path.rglob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[Checkpoint.open(path.parent).files[0].header_bytes + 5] ^= 1
    path.write_bytes(raw)
    out = tmp_path / "out"
    said = refusal(capsys, "export", tmp_path / "run", "--out", out, "--format", "safetensors")
    assert "rank-00000.safetensors holds other bytes than were written" in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_name_of_the_hub_needs_its_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "import", "ORG/NAME", "--out", tmp_path / "out")
    assert said.endswith(
        "ORG/NAME: does not exist: give a folder that holds a model, or hf:ORG/NAME\n"
    )


def test_export_refuses_what_it_cannot_do(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "out")
    trained(tmp_path / "windowed", window=4)
    cases = [
        ((finished, "--out", finished), f"--out {finished}: already exists"),
        ((tmp_path / "none", *out), "none: does not exist"),
        ((tmp_path, *out), "holds no checkpoint"),
        (
            (tmp_path / "windowed", *out),
            "window 4: transformers has no such model (GPT2LMHeadModel,",
        ),
        ((finished, *out, "--tokenizer", "no.json"), "there is no tokenizer 'no.json'"),
        ((finished, *out, "--format", "gguf"), "gguf"),
        ((finished,), "--out"),
    ]
    for arguments, said in cases:
        assert said in refusal(capsys, "export", *arguments)
    trained(tmp_path / "whole", window=31)  # a window that hides nothing
    assert "has no tokenizer.json" in refusal(capsys, "export", tmp_path / "whole", *out)
    assert run("export", tmp_path / "whole", *out, "--tokenizer", "none") == 0


def test_no_room_leaves_nothing(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        said = refusal(capsys, "export", finished, "--out", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written (File too large)" in said
    assert list(tmp_path.iterdir()) == []


def test_export_holds_one_tensor_and_two_pieces(tmp_path: Path) -> None:
    trained(tmp_path / "run", layers=1, d_ff=200_000)
    with LiveTrace() as trace:
        assert run("export", tmp_path / "run", "--out", tmp_path / "hf", "--tokenizer=none") == 0
    largest_bytes = ELEMENT_BYTES * 16 * 200_000  # 12.8 MB, of 25.6 in all
    assert trace.peak_bytes() < largest_bytes + 2.2 * ELEMENT_BYTES * CHUNK_ELEMENTS
