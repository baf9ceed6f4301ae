"""`plan --from`: configs of strangers are read, planned, and changed in their own words."""

import json
import random
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from plan_from import files_of, planned
from published_rows import published_rows
from strangers_configs import REFUSED, SAMPLES, asked

from launcher.config.arguments import parse_run_config
from launcher.config.schema import RunConfig
from launcher.forecast.plan_cli import parse_options
from launcher.tools.plan_from.assess import plan_of
from launcher.tools.plan_from.editing import edited
from launcher.tools.plan_from.engines import ENGINES
from launcher.tools.plan_from.flags import gpus_of, training_flags
from launcher.tools.plan_from.kinds import KINDS
from launcher.tools.plan_from.kinds.transformers import TRAINING_ARGUMENTS
from launcher.tools.plan_from.output import ours
from launcher.tools.plan_from.plan_from_cli import main
from launcher.tools.plan_from.reading import read_source, source_of
from launcher.tools.plan_from.translate import Reading, configured, read_files
from launcher.util.errors import UserError
from launcher.util.json_file import read_json

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples, as files."""
    place = tmp_path_factory.mktemp("strangers")
    for name, text in SAMPLES.items():
        (place / name).write_text(text)
    return place


def understood(path: Path, *given: str) -> tuple[Reading, RunConfig]:
    """Read a file and return its facts and the run that it becomes."""
    reading = read_files([read_source(path)])
    options, user = parse_options([*given, "--gpu", "H100"])
    gpus, machines = gpus_of(reading, options.gpus if "--gpus" in given else None, None)
    flags, _ = training_flags(reading, user, gpus, machines)
    return reading, parse_run_config(flags, gpus)


def test_the_last_of_a_key_given_twice_counts(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    text = "model_name_or_path: gpt2\noutput_dir: x\nlearning_rate: 1\n"
    path.write_text(f"{text}per_device_train_batch_size: 1\nper_device_train_batch_size: 2\n")
    assert understood(path)[1].data.micro_batch == 2


def test_llama_factorys_max_length_is_for_generation(folder: Path) -> None:
    path = folder / "max_length.yaml"
    text = "stage: sft\nfinetuning_type: full\nmodel_name_or_path: gpt2\ntemplate: default\n"
    path.write_text(f"{text}cutoff_len: 512\nmax_length: 128\n")
    reading, config = understood(path)
    assert config.data.seq_len == 512
    assert "max_length" in reading.no_effect


def test_gathers_are_planned_as_limited(folder: Path) -> None:
    path = folder / "limited.yaml"
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n"
        "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
    )
    path.write_text(f"{text}  limit_all_gathers: true\n  fsdp_use_orig_params: true\n")
    reading = read_files([read_source(path)])
    assert reading.left_out == []


@pytest.mark.parametrize("name", SAMPLES)
def test_a_strangers_config_is_read(folder: Path, name: str) -> None:
    if name in REFUSED:
        with pytest.raises(UserError, match=rf"{name}: .*has no name here: give --hf-config"):
            plan_of([read_source(folder / name)], [*asked(name), "--gpu", "H100"])
        return
    reading, config = understood(folder / name, *asked(name))
    assert not [text for text in reading.left_out if "not known here" in text]
    assert config.data.global_batch
    assert config.data.global_batch % config.data.micro_batch == 0


def test_other_trainers_compile_only_where_they_are_told_to(tmp_path: Path) -> None:
    """Ours would choose to for so many steps."""
    path = tmp_path / "args.yaml"
    text = "output_dir: out\nlearning_rate: 1e-4\nmodel_name_or_path: meta-llama/Llama-3.2-1B\n"
    text += "per_device_train_batch_size: 8\nbf16: true\n"
    for more, compiled in (("", False), ("torch_compile: true\n", True)):
        path.write_text(text + more)
        flags = ("--gpus", "1", "--steps", "1000000", "--seq-len", "256")
        assert understood(path, *flags)[1].loop.compile is compiled


def test_samples_are_enough_and_most_are_read() -> None:
    assert len(SAMPLES) >= 40
    assert len(REFUSED) <= len(SAMPLES) // 10
    assert {kind.engine for kind in KINDS} <= ENGINES.keys()


SAID: dict[str, dict[str, Any]] = {
    "acc_fsdp1_hybrid.yaml": {"strategy": "fsdp", "replicate": 2, "precision": "bf16"},
    "acc_fsdp2.yaml": {"reshard_after_forward": False, "activation_checkpointing": "full"},
    "acc_zero2.yaml": {"zero": 2, "offload_optimizer": "cpu", "global_batch": 16},
    "args.json": {"optimizer": "adamw", "global_batch": 32, "precision": "bf16", "loss_chunk": 0},
    "finetune.sh": {"strategy": "fsdp", "micro_batch": 2, "global_batch": 8, "seq_len": 2048},
    "sft.yaml": {"activation_checkpointing": "full", "precision": "bf16"},
    "sft_lora.yaml": {"lora_rank": 32, "lora_targets": "all", "quantize_base": "nf4"},
    "sft_whole.yaml": {"zero": 3, "grad_accum_dtype": "bf16", "loss_chunk": 0},
    "full.yml": {"precision": "bf16-pure", "compensation": False, "optimizer": "adamw8bit"},
    "fsdp2.yml": {"precision": "bf16", "strategy": "fsdp"},
    "lora.yml": {"lora_targets": "qkv,proj", "activation_checkpointing": "offload"},
    "lf_full.yaml": {"zero": 3, "activation_checkpointing": "full", "model": "qwen3-4b"},
    "lf_pure.yaml": {"precision": "bf16-pure", "activation_checkpointing": "none"},
    "lf1_fsdp2.yaml": {"precision": "bf16", "strategy": "fsdp", "loss_chunk": 0, "micro_batch": 2},
    "lf1_cp.yaml": {"context_parallel": 2, "attention": "flash", "global_batch": 16},
    "lf1_qlora.yaml": {"lora_rank": 16, "lora_targets": "all", "quantize_base": "nf4"},
    "lf1_zero.yaml": {"zero": 3, "activation_checkpointing": "full", "model": "qwen3-0.6b"},
    "titan_tp.toml": {"tensor_parallel": 8, "strategy": "fsdp", "model": "llama-3.1-70b"},
    "titan_old.toml": {"micro_batch": 8, "activation_checkpointing": "full"},
    "titan_2026.sh": {"micro_batch": 2, "seq_len": 8192, "model": "llama-3.1-8b"},
    "zero2.json": {"zero": 2, "offload_optimizer": "cpu", "precision": "fp16"},
    "lit_full.yaml": {"strategy": "fsdp", "precision": "bf16-pure"},
    "lit_qlora.yaml": {"lora_rank": 32, "quantize_base": "nf4", "lora_targets": "qkv"},
}


@pytest.mark.parametrize("name", SAID)
def test_their_words_become_ours(folder: Path, name: str) -> None:
    _, config = understood(folder / name, *asked(name))
    flat = config.flat()
    assert {key: flat.get(key) for key in SAID[name]} == SAID[name]


def test_switches_are_words_and_no_values() -> None:
    assert ours({"lora": True, "foreach": False}) == "adapters, no foreach update"


def test_what_bears_on_bytes_and_is_not_planned_is_named(folder: Path) -> None:
    reading, _ = understood(folder / "dpo.yml")
    assert any(text.startswith("rl: another objective") for text in reading.left_out)
    path = folder / "alpaca.sh"
    path.write_text(
        "python x.py --base_model gpt2 --micro_batch_size 8 --lora_r 16 --num_epochs 1\n"
    )
    reading, config = understood(path)
    assert config.model.lora_rank is None
    assert "a rank of 16: nothing asks for adapters beside it" in reading.left_out
    path = folder / "components.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 64\n'
        'mixed_precision_reduce = "bfloat16"\n[compile]\nenable = true\ncomponents = ["loss"]\n'
    )
    reading, _ = understood(path, "--gpus", "2")
    assert ["reduced in fp32" in reading.left_out[0], "compiled, too" in reading.left_out[1]] == [
        *(True, True)
    ]
    reading, _ = understood(folder / "titan_fp8.toml", "--gpus", "16")
    assert any("pipelines are not planned" in text for text in reading.left_out)
    assert "lr_scheduler.warmup_steps" in reading.no_effect
    path = folder / "states.json"
    states = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    amp = {"enabled": False, "opt_level": "O1"}
    section = {"zero_optimization": {"stage": 1}, "elasticity": {"enabled": True}}
    path.write_text(json.dumps({"bf16": states, "amp": amp, **section}))
    reading, _ = understood(path, *asked("zero1.json"))
    assert [text.partition(":")[0].partition(".")[2] for text in reading.left_out] == [
        *("bf16_master_weights_and_grads", "bf16_optimizer_states", "enabled")
    ]
    reading, _ = understood(folder / "zeropp.json", *asked("zeropp.json"))
    assert sum("no part of the planned ZeRO" in text for text in reading.left_out) == 2


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("stage: dpo\ntemplate: x\ncutoff_len: 8\n", "stage dpo: is planned as sft"),
        ("stage: sft\nuse_asft_loss: true\ntemplate: x\n", "its reference model is not planned"),
        ("stage: sft\nfinetuning_type: oft\ntemplate: x\n", "oft: is planned as LoRA"),
        ("beta: 0.1\nmax_prompt_length: 8\nlearning_rate: 1\n", "another trainer than SFT"),
        ("use_vllm: true\nnum_generations: 8\noutput_dir: x\n", "another trainer than SFT"),
    ],
)
def test_another_objective_is_named(tmp_path: Path, text: str, note: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model_name_or_path: gpt2\nper_device_train_batch_size: 1\n{text}")
    assert any(note in each for each in understood(path)[0].left_out)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--micro-batch", "1", "--seq-len", "8"], "which model: give --model NAME"),
        (["--model", "nano", "--seq-len", "8"], "the micro-batch: give --micro-batch N"),
        (["--model", "nano"], "--micro-batch N and the length of sequences: give --seq-len N"),
    ],
)
def test_a_missing_fact_is_asked_for_by_its_flag(
    folder: Path, capsys: pytest.CaptureFixture[str], given: list[str], sentence: str
) -> None:
    path = folder / "acc_ddp.yaml"
    assert main(["--from", str(path), "--gpu", "H100", *given]) == 2
    error = capsys.readouterr().err
    assert f"{path}: does not say" in error
    assert sentence in error


def test_gpus_and_their_kind_are_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--from", str(folder / "args_fsdp.json")]) == 2
    assert "which GPU? give --gpu NAME" in capsys.readouterr().err
    assert main(["--from", str(folder / "titan_8b.toml"), "--gpu", "H100"]) == 2
    assert "FSDP and does not say on how many GPUs: give --gpus N" in capsys.readouterr().err


DAMAGED = {
    "deep.yaml": "a:" + " [" * 3000,
    "deep.json": '{"a":' * 3000,
    "anchors.yaml": "a: &x [1]\nb: *x\n",
    "binary.yaml": "\x00\x01",
    "list.yaml": "- 1\n- 2\n",
    "empty.yaml": "",
    "words.toml": "this is no toml",
    "quote.sh": "torchrun --a 'b\n",
    "wide.json": json.dumps({f"k{n}": n for n in range(6000)}),
    "huge.yaml": "x: " + "9" * 300_000,
    "numbers.json": '{"zero_optimization": {"stage": 1e999}}',
    "digits.yaml": "base_model: gpt2\nmicro_batch_size: " + "9" * 40 + "\nsequence_len: -3\n",
    "types.yaml": "base_model: [1]\nmicro_batch_size: {a: b}\nsequence_len: true\nadapter: 3.5\n",
    "escape.yaml": "base_model: gpt2\nmicro_batch_size: 1\ndeepspeed: ../../etc/x.json\n",
    "other.yaml": "name: ci\non: push\njobs: {}\n",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    path.write_text(DAMAGED[name])
    code = main(["--from", str(path), "--gpu", "A10G"])
    said = capsys.readouterr()
    assert code == 2
    assert said.err.startswith("shardscale: ")
    assert said.err.count("\n") == 1
    assert name in said.err


ODD: tuple[Any, ...] = (
    None,
    "",
    "?",
    "auto",
    True,
    False,
    -1,
    0,
    3,
    2.5,
    1e300,
    [],
    ["x", 2],
    {"a": {"b": 1}},
    "1",
)


def test_odd_values_are_read_or_refused(folder: Path) -> None:
    """A key with an odd value is read, left out by name, without effect, or refused."""
    draw = random.Random(36)
    read = 0
    for _ in range(400):
        name = draw.choice(list(SAMPLES))
        source = read_source(folder / name)
        key = draw.choice(list(source.flat))
        changed = {**source.flat, key: draw.choice(ODD)}
        try:
            reading = read_files([source._replace(flat=changed)])
            _, user = parse_options([*asked(name), "--gpu", "H100"])
            training_flags(reading, user, *gpus_of(reading, 8, None))
        except UserError:
            continue
        named = {*(w[0] for w in reading.words), *reading.no_effect}
        named |= {text.split()[0].rstrip(":") for text in reading.left_out}
        assert any(f"{key}.".startswith(f"{at}.") for at in named), (name, key)
        read += 1
    assert read > 200


@pytest.mark.parametrize(
    "files",
    [{"run.sh": "run.sh"}, {"run.sh": "other.sh", "other.sh": "run.sh"}],
    ids=["itself", "in a circle"],
)
def test_configs_that_name_each_other_are_refused(
    files: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, named in files.items():
        command = f"accelerate launch --config_file {named} train.py --bf16 --output_dir x"
        Path(name).write_text(command + " --per_device_train_batch_size 2\n")
    assert main(["--from", "run.sh", "--gpu", "H100", "--model", "gpt2"]) == 2
    assert "leads back to a file that names it" in capsys.readouterr().err


def test_a_run_that_does_not_fit_gets_a_patch_that_applies(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "full.yml"
    path.write_text(SAMPLES["full.yml"] + "# the end")
    monkeypatch.chdir(tmp_path)
    asked_for = ["--from", "full.yml", "--gpu", "A10G"]
    assert main(asked_for) == 1
    said = capsys.readouterr().out
    assert "does not fit" in said
    assert "would fit: micro_batch_size: 1, gradient_accumulation_steps: 16" in said
    assert main([*asked_for, "--patch"]) == 0
    patch = capsys.readouterr().out
    subprocess.run(["git", "apply", "-"], input=patch, text=True, check=True, cwd=tmp_path)
    assert "# the end" in path.read_text()
    assert main([*asked_for, "--check"]) == 0
    assert "full.yml: fits: " in capsys.readouterr().out


def test_json_has_all_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", str(folder / "zero.yml"), "--gpu", "H100", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "fits"
    assert sum(record["ledger_bytes"].values()) == pytest.approx(record["used_bytes"], rel=1e-3)
    keys = {word["key"] for word in record["words"]}
    assert {"micro_batch_size", "zero3.json: zero_optimization.stage"} <= keys
    assert "zero3.json: gradient_clipping" in record["without_effect"]


def test_flags_are_quoted_for_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zero.json"
    offload = {"device": "nvme", "nvme_path": "/mnt/my disk"}
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": offload}}))
    run = ["--gpus", "2", "--model", "nano", "--micro-batch", "1", "--seq-len", "64"]
    assert main(["--from", str(path), "--gpu", "H100", *run]) == 0
    assert "--nvme-path '/mnt/my disk'" in " ".join(capsys.readouterr().out.split())


def test_two_files_are_one_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(folder / "acc_zero2.yaml"), str(folder / "sft.yaml")]
    assert main(["--from", *files, "--gpu", "A100-40GB", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kind"] == "trl SFT"
    assert record["flags"]["zero"] == 2
    assert record["flags"]["micro_batch"] == 2


def test_foreach_needs_more_than_fused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = {}
    for optim in ("adamw_torch", "adamw_torch_fused"):
        path = tmp_path / "args.json"
        content = read_args(tmp_path) | {"optim": optim, "per_device_train_batch_size": 1}
        path.write_text(json.dumps(content))
        main(["--from", str(path), "--gpu", "H100", "--json"])
        used[optim] = json.loads(capsys.readouterr().out)["used_bytes"]
    # A temporary of the weights' size in fp32, less what the backward needed beyond the update.
    assert 0 < used["adamw_torch"] - used["adamw_torch_fused"] <= 4 * 1_235_814_400


def read_args(folder: Path) -> dict[str, object]:
    """The sample of TrainingArguments."""
    path = folder / "sample.json"
    path.write_text(SAMPLES["args.json"])
    return read_json(path)


@pytest.mark.parametrize(
    ("name", "edit", "line"),
    [
        ("acc_fsdp1.yaml", {"fsdp_config.fsdp_activation_checkpointing": True}, None),
        ("acc_ddp.yaml", {"fsdp_config.fsdp_version": 2}, None),
        ("zero1.json", {"zero_optimization.stage": 3}, None),
        ("zero1.json", {"zero_optimization.offload_optimizer.device": "cpu"}, None),
        ("lora.yml", {"plugins": ["a.b"]}, "  - a.b"),
        ("titan_8b.toml", {"activation_checkpoint.mode": "full"}, 'mode = "full"'),
        ("titan_8b.toml", {"compile.enable": True}, "enable = true"),
        ("run_clm.sh", {"gradient_checkpointing": True}, None),
        ("finetune.sh", {"per_device_train_batch_size": 1}, None),
        ("run_clm.sh", {"fsdp": "full_shard auto_wrap"}, None),
    ],
)
def test_an_edit_changes_its_keys_only(
    folder: Path, name: str, edit: dict[str, Any], line: str | None
) -> None:
    source = read_source(folder / name)
    text = edited(source, edit)
    after = source_of(source.path, text)
    for key, value in edit.items():
        found = after.flat[key]
        if isinstance(value, list):
            assert value[0] in found
        else:
            assert str(found).lower() == str(value).lower()
    others = {key: value for key, value in source.flat.items() if key not in edit}
    assert {key: after.flat[key] for key in others} == others
    assert line is None or line in text.splitlines()


def test_an_edit_of_json_that_has_another_suffix_is_json() -> None:
    source = source_of(Path("zero.conf"), SAMPLES["zero2.json"])
    edit = {"zero_optimization.offload_param.device": "cpu", "zero_optimization.stage": 3}
    assert source_of(source.path, edited(source, edit)).flat == {**source.flat, **edit}


def test_published_runs_of_these_trainers() -> None:
    """As bench/plan_from.py has planned them last; two are planned anew."""
    path = ROOT / "bench" / "results" / "plan_from.json"
    rows = {row["key"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    errors = [abs(row["ratio"] - 1) for row in rows.values() if row["ratio"]]
    assert len(errors) >= 30
    assert statistics.median(errors) <= 0.08
    assert [
        key for key, row in rows.items() if row["runs"] is False and row["verdict"] == "fits"
    ] == []
    published = {row.key: row for row in published_rows()}
    for key in ("torchtitan-7b-x8-full", "autotuning-gpt2-xl-ddp-1"):
        files = files_of(published[key])
        assert files is not None
        record = planned(published[key], files)
        assert record["verdict"] == rows[key]["verdict"]
        if rows[key]["planned_bytes"]:
            assert record["allocated_bytes"] == pytest.approx(rows[key]["planned_bytes"], rel=0.02)


def test_variables_of_a_script_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown batch was planned as 8, and listed as without effect."""
    script = tmp_path / "run.sh"
    script.write_text(
        "export BATCH=4 LENGTH=512\n"
        "torchrun --nproc 2 train.py --model_name_or_path ${MODEL:-gpt2} --output_dir $OUT \\\n"
        "  --per_device_train_batch_size $BATCH --max_seq_length ${LENGTH} --optim $OPTIM\n"
    )
    assert main(["--from", str(script), "--gpu", "H100"]) == 0
    said = capsys.readouterr().out
    assert "parameters, global batch 8 x 512 tokens, on 2 x " in said
    assert "optim $OPTIM: known only to the shell" in said
    arithmetic = script.read_text().replace("BATCH=4", "BATCH=4 STEPS=$((64 / 8))")
    script.write_text(
        arithmetic.replace(" --optim $OPTIM", " --gradient_accumulation_steps $STEPS")
    )
    assert main(["--from", str(script), "--gpu", "H100"]) == 0
    assert "gradient_accumulation_steps $STEPS: known only to the shell" in capsys.readouterr().out
    script.write_text(script.read_text().replace("BATCH=4", "OTHER=4"))
    assert main(["--from", str(script), "--gpu", "H100"]) == 2
    said = capsys.readouterr().err
    assert "per_device_train_batch_size $BATCH: known only to the shell: give --micro-batch" in said
    assert main(["--from", str(script), "--gpu", "H100", "--micro-batch", "2"]) == 0
    assert "global batch 4 x" in capsys.readouterr().out


def test_a_short_config_of_transformers_is_read_and_two_precisions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.yaml"
    short.write_text("per_device_train_batch_size: 2\nbf16: true\nmodel_name_or_path: gpt2\n")
    assert main(["--from", str(short), "--gpu", "H100"]) == 0
    assert "transformers TrainingArguments" in capsys.readouterr().out
    short.write_text(short.read_text() + "fp16: true\n")
    assert main(["--from", str(short), "--gpu", "H100"]) == 2
    assert "fp16 True beside bf16 asks for two precisions" in capsys.readouterr().err


def test_a_file_that_is_named_by_its_place_elsewhere_is_found_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or among the files that are given; where it is neither, a flag says the sharding."""
    (tmp_path / "there").mkdir()
    config, stage = tmp_path / "run.yaml", tmp_path / "zero.json"
    config.write_text(
        "per_device_train_batch_size: 2\nmodel_name_or_path: gpt2\nbf16: true\n"
        "deepspeed: /cluster/configs/zero.json\n"
    )
    stage.write_text('{"zero_optimization": {"stage": 2}}')
    elsewhere = tmp_path / "there" / "zero.json"
    planned = ["--gpu", "H100", "--gpus", "2"]
    assert main(["--from", str(config), *planned]) == 0
    assert "zero_optimization.stage: 2" in capsys.readouterr().out
    stage.rename(elsewhere)
    assert main(["--from", str(config), *planned]) == 2
    assert (
        "zero.json: not beside this file: give the file to --from, too" in capsys.readouterr().err
    )
    assert main(["--from", str(config), *planned, "--zero", "3"]) == 0
    assert "zero.json: not beside this file" in capsys.readouterr().out
    assert main(["--from", str(config), str(elsewhere), *planned]) == 0
    said = capsys.readouterr().out
    assert "zero_optimization.stage: 2" in said
    assert "not beside" not in said

    config = tmp_path / "run.sh"
    config.write_text(
        "deepspeed train.py --deepspeed $1 --output_dir x --model_name_or_path gpt2 "
        "--per_device_train_batch_size 1 --learning_rate 1\n"
    )
    reading = read_files([read_source(config)])
    assert reading.kind.engine == "transformers"
    assert main(["--from", str(config), *planned]) == 2
    assert "deepspeed $1: known only to the shell: give the file" in capsys.readouterr().err
    assert main(["--from", str(config), str(elsewhere), *planned]) == 0
    assert "--zero 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "rank", "note"),
    [
        ("stage: sft\nfinetuning_type: freeze\ntemplate: x\n", None, "is planned as full"),
        ("adapter: llama-adapter\nmicro_batch_size: 1\n", 8, "is planned as LoRA"),
    ],
)
def test_a_word_without_a_counterpart_is_planned_as_its_note_says(
    tmp_path: Path, text: str, rank: int | None, note: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{text}model_name_or_path: gpt2\nbase_model: gpt2\nbf16: true\n")
    reading, config = understood(path)
    assert any(note in each for each in reading.left_out)
    assert config.model.lora_rank == rank


def test_a_switch_that_is_off_undoes_no_other_precision(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model_name_or_path: gpt2\ndataset_name: x\nmax_length: 512\nfp16: true\nbf16: false\n"
    )
    assert understood(path)[1].optim.precision == "fp16"


def test_a_command_line_wins_over_the_files_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
        "mixed_precision: bf16\nnum_processes: 8\n"
    )
    path = tmp_path / "run.sh"
    path.write_text(
        "accelerate launch --config_file zero3.yaml --num_processes 4 train.py --output_dir x "
        "--model_name_or_path gpt2 --per_device_train_batch_size 2 --learning_rate 1\n"
    )
    reading, config = understood(path)
    assert config.sharding.zero == 3
    assert config.data.global_batch == 8
    assert "zero3.yaml: num_processes" not in [key for key, _, _ in reading.words]

    (tmp_path / "llama.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n'
        "local_batch_size = 1\n"
        '[activation_checkpoint]\nmode = "full"\n'
    )
    path.write_text(
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file llama.toml "
        "--training.seq_len 1024 --training.steps 9 --activation_checkpoint.mode none\n"
    )
    config = understood(path)[1]
    assert config.data.seq_len == 1024
    assert config.data.global_batch == 8
    assert config.model.activation_checkpointing == "none"


@pytest.mark.parametrize(
    ("launcher", "end", "ranks"),
    [
        ("torchrun --nproc_per_node 2", "2>&1 | tee log.txt", 2),
        ("python prepare.py --rows 3 && torchrun --nproc_per_node 2", "> log.txt &", 2),
        ("torchrun --nproc_per_node gpu", "", 1),
        ("torchrun --nnodes=1:4 --nproc_per_node=8", "", 32),
        ("deepspeed --num_nodes 2 --num_gpus 8", "", 16),
        ("deepspeed --include localhost:2,3", "", 2),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 deepspeed", "", 4),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --num_processes 2", "", 2),
    ],
)
def test_a_line_of_a_shell_is_one_command(
    tmp_path: Path, launcher: str, end: str, ranks: int
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        f"{launcher} train.py --output_dir x --eos_token '<|im_end|>' --learning_rate 1 "
        f"--model_name_or_path gpt2 --per_device_train_batch_size 3 {end}\n"
    )
    reading, config = understood(path)
    assert config.data.micro_batch == 3
    assert config.data.global_batch == 3 * ranks
    assert [text.split(":")[0] for text in reading.left_out if "gpu" not in text] == ["eos_token"]


@pytest.mark.parametrize(
    "text",
    [
        'ARGS="\n  --nproc_per_node 2 \\\n  --nnodes $(hostname | wc -l)\n"\n'
        "torchrun $ARGS train.py --output_dir x --learning_rate 1 --model_name_or_path gpt2 "
        '--per_device_train_batch_size 3 "$@"\n'
        "python evaluate.py --model x --batch 8\n",
        "RUN=(\n  --nproc_per_node 2\n  # for now\n)\n"
        'cmd="torchrun ${RUN[@]} train.py --output_dir x --learning_rate 1"\n'
        "eval $cmd --model_name_or_path 'gpt2' --per_device_train_batch_size 3 $MORE\n",
    ],
)
def test_flags_in_variables_and_arrays_of_a_shell_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    reading, config = understood(path)
    assert config.data.global_batch == 3 * 2
    rest = ["$@"] if "$@" in text else ["$MORE"]
    assert [each.split(":")[0] for each in reading.left_out if "nnodes" not in each] == rest


def test_values_of_values_do_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    twice = 'A="$A $A"\n' * 100
    path.write_text(f'A="--a 1"\n{twice}python x.py --bf16 True $A\n')
    assert read_source(path).flat["bf16"] == "True"


def test_a_config_that_a_command_line_names_is_below_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ddp.yaml").write_text(
        "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n"
    )
    (tmp_path / "sft.yaml").write_text(
        "stage: sft\nmodel_name_or_path: nano\nfinetuning_type: full\ncutoff_len: 64\n"
        "per_device_train_batch_size: 4\n"
    )
    path = tmp_path / "run.sh"
    for text, ranks, micro in (
        ("accelerate launch --config_file ddp.yaml src/train.py sft.yaml", 2, 4),
        ("llamafactory-cli train sft.yaml per_device_train_batch_size=1", 1, 1),
        ("trl sft --config sft.yaml --per_device_train_batch_size 2", 1, 2),
        ("NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train sft.yaml", 16, 4),
        ("CUDA_VISIBLE_DEVICES=0,1 python -m llamafactory.cli train sft.yaml", 1, 4),
    ):
        path.write_text(f"{text}\n")
        assert main(["--from", str(path), "--gpu", "H100", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert (record["kind"], record["file"]) == (
            "LLaMA-Factory YAML",
            str(path.parent / "sft.yaml"),
        )
        assert record["flags"]["global_batch"] == ranks * micro


@pytest.mark.parametrize(
    ("text", "precision", "recomputes"),
    [
        ("", "bf16-pure", "none"),  # bf16: auto is Axolotl's default
        ("bf16: false\n", "fp32", "none"),
        ("fp16: true\nbf16: false\n", "fp16", "none"),
        ("fp16: true\nbf16: auto\n", "fp16", "none"),
        ("activation_offloading: true\ngradient_checkpointing: true\n", "bf16-pure", "offload"),
        (
            "fsdp_config:\n  activation_checkpointing: true\ngradient_checkpointing: false\n",
            "bf16-pure",
            "full",
        ),
    ],
)
def test_the_order_of_keys_and_axolotls_default_precision(
    tmp_path: Path, text: str, precision: str, recomputes: str
) -> None:
    path = tmp_path / "lora.yml"
    path.write_text(f"{text}base_model: gpt2\nmicro_batch_size: 1\nsequence_len: 512\n")
    config = understood(path)[1]
    assert config.optim.precision == precision
    assert config.model.activation_checkpointing == recomputes


def test_auto_is_refused_and_an_assumed_length_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "short.yaml"
    path.write_text("per_device_train_batch_size: 1\nmodel_name_or_path: gpt2\n")
    assert main(["--from", str(path), "--gpu", "H100", "--micro-batch", "auto"]) == 2
    assert "--micro-batch auto: give a number" in capsys.readouterr().err
    assert main(["--from", str(path), "--gpu", "H100"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "sequences of 1024 tokens are assumed: --seq-len N" in said
    assert "no key asks for bf16 or fp16: fp32 is planned" in said
    path.write_text(f"{path.read_text()}bf16: true\n")
    assert main(["--from", str(path), "--gpu", "H100"]) == 0
    assert "no key asks" not in capsys.readouterr().out


def test_tensor_parallelism_of_0_ranks_is_none(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": 0}}')
    given = ("--model", "gpt2", "--micro-batch", "1", "--seq-len", "8", "--gpus", "1")
    assert understood(path, *given)[1].data.global_batch == 1


def test_flags_of_accelerate_launch_are_below_those_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\n")
    launch = "accelerate launch --mixed_precision bf16 --num_processes 4 --config_file fsdp.yaml"
    path.write_text(
        f"{launch} train.py --model_name_or_path gpt2 --learning_rate 1 "
        "--per_device_train_batch_size 2\n"
    )
    reading, config = understood(path)
    assert reading.kind.engine == "transformers"
    assert (config.sharding.strategy, config.data.global_batch) == ("fsdp", 8)
    path.write_text(f"{launch} train.py\n")
    given = ("--model", "gpt2", "--micro-batch", "1", "--seq-len", "8")
    assert understood(path, *given)[1].sharding.strategy == "fsdp"
    path.write_text(
        "accelerate launch --use_deepspeed --num_processes 4 --zero_stage $1 train.py "
        "--model_name_or_path gpt2 --learning_rate 1 --per_device_train_batch_size 2\n"
    )
    with pytest.raises(UserError, match=r"zero_stage \$1: known only to the shell: give the file"):
        understood(path)


def test_flags_of_scripts_around_transformers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    run = (
        "python train.py --output_dir x --learning_rate 1 --model_name_or_path gpt2 "
        "--per_device_train_batch_size 1 --max_seq_len 512 --lora_dim 16 "
    )
    path.write_text(f"{run}--bits 4 --use_flash_attn True\n")
    reading, config = understood(path)
    assert reading.left_out == []
    assert (config.model.lora_rank, config.model.quantize_base) == (16, "nf4")
    assert (config.data.seq_len, config.model.attention) == (512, "flash")
    path.write_text(f"{run}--optim_args rank=64\n")
    assert understood(path)[0].left_out == [
        "optim_args: states are planned with the optimizer's defaults"
    ]
    path.write_text(f"{run.replace('model_name_or_path', 'model_name')}--qlora True\n")
    assert understood(path)[1].model.quantize_base == "nf4"
    for off in ("--use_lora False", "--lora_dim 0"):
        path.write_text(f"{run}{off}\n")
        assert understood(path)[1].model.lora_rank is None


def test_fsdps_section_in_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nproc 2 train.py --output_dir x --learning_rate 1 --model_name_or_path gpt2 "
        "--per_device_train_batch_size 1 --fsdp full_shard --fsdp_config fsdp.json\n"
    )
    reading, _ = understood(path)
    assert reading.left_out == ["fsdp_config fsdp.json: not beside this file"]
    section = {"activation_checkpointing": True, "fsdp_cpu_offload": True, "min_num_params": 9}
    (tmp_path / "fsdp.json").write_text(json.dumps(section))
    reading, config = understood(path)
    assert config.model.activation_checkpointing == "full"
    assert config.sharding.offload_param == "cpu"
    assert reading.left_out == [
        "fsdp.json: fsdp_config.min_num_params: each block is planned as a group"
    ]


@pytest.mark.parametrize(
    ("launch", "stage"),
    [
        ("--use_deepspeed", 2),
        ("--use_deepspeed --zero_stage 3", 3),
        ("--use_deepspeed --zero_stage 0", None),
        ("train.py --deepspeed_stage 3", 3),
        ("--use_deepspeed --deepspeed_config_file ds.json", None),
        ("--config_file deepspeed.yaml", 2),
        ("--use_deepspeed --deepspeed_config_file stage3.conf", 3),
    ],
)
def test_deepspeed_without_a_stage_has_that_of_accelerate(
    tmp_path: Path, launch: str, stage: int | None
) -> None:
    (tmp_path / "deepspeed.yaml").write_text("distributed_type: DEEPSPEED\nmixed_precision: bf16\n")
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}, "train_batch_size": "auto"}')
    (tmp_path / "stage3.conf").write_text('{"zero_optimization": {"stage": 3}}')
    path = tmp_path / "run.sh"
    path.write_text(
        f"accelerate launch --num_processes 4 {launch} train.py --learning_rate 1 "
        "--output_dir x --model_name_or_path gpt2 --per_device_train_batch_size 2\n"
    )
    assert understood(path)[1].sharding.zero == stage


def test_flags_of_accelerate_launch_are_known() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    flags = {action.dest for action in launch.launch_command_parser()._actions}
    kind = TRAINING_ARGUMENTS
    rest = {f for f in flags if f not in kind.keys and not kind.has_no_effect(f)}
    others = ("fp8_", "megatron_lm_", "aws_", "training_script", "use_megatron_lm", "help")
    alone = {"env", "tpu", "vm"}
    assert {flag for flag in rest if not flag.startswith(others)} <= alone


def test_sharding_by_flags_of_accelerate_launch(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "accelerate launch --num_processes 4 --use_fsdp --fsdp_version 2 "
        "--fsdp_reshard_after_forward false --fsdp_offload_params true "
        "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
        "--fsdp_activation_checkpointing_offload true --dynamo_backend inductor "
        "--use_parallelism_config true --parallelism_config_tp_size 2 train.py "
        "--output_dir x --model_name_or_path gpt2 --per_device_train_batch_size 2\n"
    )
    reading, config = understood(path)
    assert reading.left_out == []
    sharding = config.sharding
    assert (sharding.strategy, sharding.reshard_after_forward) == ("fsdp", False)
    assert sharding.offload_param == "cpu"
    assert (config.model.activation_checkpointing, config.loop.compile) == ("offload", True)
    assert sharding.tensor_parallel == 2


@pytest.mark.parametrize(
    ("text", "dropout"),
    [
        ("base_model: gpt2\nmicro_batch_size: 1\nadapter: lora\nlora_dropout: 0.1\n", 0.1),
        ("base_model: gpt2\nmicro_batch_size: 1\nadapter: lora\n", 0.0),
        ("model_name: gpt2\nout_dir: x\nlora_query: true\n", 0.05),  # LitGPT's default
    ],
)
def test_dropout_in_front_of_adapters_is_planned(tmp_path: Path, text: str, dropout: float) -> None:
    path = tmp_path / "lora.yml"
    path.write_text(text)
    assert understood(path)[1].model.lora_dropout == dropout


def test_a_switch_of_a_command_line_is_turned_off(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "trl sft --model_name_or_path gpt2 --dataset_name x --max_length 512 --packing true "
        "--no_gradient_checkpointing --per_device_train_batch_size 1\n"
    )
    assert understood(path)[1].model.activation_checkpointing == "none"
    with pytest.raises(UserError):
        edited(read_source(path), {"gradient_checkpointing": True})


@pytest.mark.parametrize(
    ("said", "targets", "layers", "note"),
    [
        ("", "qkv", "q_proj,v_proj", None),  # PEFT's own default
        ("lora_target_modules: [q_proj, v_proj, lm_head]\n", "qkv", "q_proj,v_proj", "lm_head"),
        (
            "lora_target_modules: 'model.layers.[\\d]+.(mlp|self_attn).(up|down|q|o)_proj'\n",
            "qkv,proj,mlp",
            "up_proj,down_proj,q_proj,o_proj",
            None,
        ),
        ("lora_target_linear: true\nlora_target_modules: [q_proj]\n", "all", None, None),
    ],
)
def test_layers_with_adapters_are_those_of_peft(
    tmp_path: Path, said: str, targets: str, layers: str | None, note: str | None
) -> None:
    path = tmp_path / "lora.yml"
    path.write_text(f"base_model: gpt2\nmicro_batch_size: 1\nadapter: lora\n{said}")
    reading, config = understood(path)
    assert config.model.lora_targets == targets
    assert reading.facts.get("layers") == layers
    assert [str(note) in text for text in reading.left_out] == ([True] if note else [])


@pytest.mark.parametrize(
    ("model", "said", "layers"),
    [
        ("google/gemma-2-2b", "", "q_proj,v_proj"),
        ("google/gemma-2-2b", "lora_target_modules: [k_proj, up_proj]\n", "k_proj,up_proj"),
        ("microsoft/phi-2", "", "q_proj,v_proj,fc1,fc2"),
        ("EleutherAI/pythia-1.4b", "", "query_key_value"),
        ("google/gemma-2-2b", "lora_target_modules: all-linear\n", "all"),
    ],
)
def test_layers_of_models_that_transformers_computes_have_their_own_names(
    tmp_path: Path, model: str, said: str, layers: str
) -> None:
    path = tmp_path / "lora.yml"
    path.write_text(f"base_model: {model}\nmicro_batch_size: 1\nadapter: lora\n{said}")
    assert understood(path)[1].model.lora_targets == layers


def test_version_1_of_llama_factory_computes_in_bf16_where_it_shards(folder: Path) -> None:
    """One GPU has no mesh, so that its FSDP, which would cast, is passed over."""
    for gpus, expected in (("1", ("single", "fp32")), ("2", ("fsdp", "bf16"))):
        _, config = understood(folder / "lf1_fsdp2.yaml", "--gpus", gpus)
        assert (config.sharding.strategy, config.optim.precision) == expected


@pytest.mark.parametrize(
    ("said", "given", "gpus", "replicate"),
    [
        ("dp_shard_size: 4\n", ("--gpus", "8"), 8, 2),
        ("dp_shard_size: 4\n", (), 4, 1),
        ("dp_shard_size: 2\ntensor_parallel_size: 2\ndp_replicate_size: 2\n", (), 8, 2),
        ("dp_shard_size: 2\ncontext_parallel_size: 2\n", ("--gpus", "16"), 16, 4),
        ("dp_replicate_size: 2\n", ("--gpus", "8"), 8, 2),
    ],
)
def test_ranks_that_axolotl_does_not_shard_over_are_replicas(
    tmp_path: Path, said: str, given: tuple[str, ...], gpus: int, replicate: int
) -> None:
    path = tmp_path / "fsdp.yml"
    text = "base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 1\nfsdp_version: 2\n"
    path.write_text(f"{text}{said}")
    reading, config = understood(path, *given)
    assert config.sharding.replicate == replicate
    assert gpus_of(reading, int(given[1]) if given else None, None)[0] == gpus


def test_axolotls_ranks_of_a_sequence_may_be_chosen_when_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("base_model: gpt2\nsequence_len: 8\ncontext_parallel_size: auto\n")
    assert understood(path)[0].left_out == [
        "context_parallel_size auto: is chosen when it runs: give --context-parallel N"
    ]


def test_torchs_context_parallelism_is_a_ring(tmp_path: Path) -> None:
    accelerate, titan = tmp_path / "accelerate.yaml", tmp_path / "titan.toml"
    given = ("--model", "llama-3.2-1b", "--micro-batch", "1", "--seq-len", "512")
    for ranks, method in ((1, "auto"), (2, "ring")):
        accelerate.write_text(
            "distributed_type: FSDP\nnum_processes: 4\nparallelism_config:\n"
            f"  parallelism_config_cp_size: {ranks}\n"
        )
        titan.write_text(
            '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n'
            f"[parallelism]\ncontext_parallel_degree = {ranks}\n"
        )
        for path, more in ((accelerate, given), (titan, ("--gpus", "8"))):
            sharding = understood(path, *more)[1].sharding
            assert (sharding.context_parallel, sharding.context_parallel_method) == (ranks, method)


def test_gpus_of_the_shell_are_those_of_version_1_of_llama_factory(folder: Path) -> None:
    path = folder / "v1.sh"
    path.write_text("USE_V1=1 CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli sft lf1_fsdp2.yaml\n")
    reading = read_files([configured(read_source(path))])
    assert gpus_of(reading, None, None)[0] == 2


def test_configs_that_trl_ships_are_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    text = "model_name_or_path: gpt2\ndataset_name: x\npacking: true\naccelerate_config: "
    for name, said in (("zero2", ""), ("zero2", "num_processes: 4\n"), ("fsdp2", "")):
        path.write_text(f"{text}{name}\n{said}")
        reading, config = understood(path)
        sharding = (config.sharding.zero, config.sharding.strategy)
        assert sharding == ((2, None) if name == "zero2" else (None, "fsdp"))
        assert config.data.global_batch == config.data.micro_batch * (4 if said else 8)
        assert reading.left_out == []
    path.write_text(f"{text}zero9\n")
    with pytest.raises(UserError, match=r"zero9: is no config that trl has: .* or --zero$"):
        understood(path)
    assert len(understood(path, "--zero", "1")[0].left_out) == 1
    path.write_text(f"{text}mine.yaml\n")
    with pytest.raises(UserError, match=r"mine.yaml: not beside this file"):
        understood(path)


def test_sequences_that_trl_does_not_cut_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model_name_or_path: gpt2\ndataset_name: x\nuse_peft: false\nmax_length: null\n"
    )
    reading, _ = understood(path)
    assert reading.left_out == ["max_length None: sequences are not cut short: give --seq-len N"]


def test_a_program_is_not_a_config(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import trl\n")
    with pytest.raises(UserError, match=r"is a program: .* rehearse --gpu NAME -- python"):
        read_source(path)


def test_arguments_of_trls_model_are_read(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model_name_or_path: gpt2\ndataset_name: x\npacking: true\nmodel_init_kwargs:\n"
        "  torch_dtype: bfloat16\n  attn_implementation: eager\n"
    )
    reading, config = understood(path)
    assert (reading.facts["weights"], config.model.attention) == ("bf16", "eager")
    assert reading.left_out == []


def test_degrees_of_torchtitan_are_those_of_its_gpus(tmp_path: Path) -> None:
    path = tmp_path / "titan.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 512\nlocal_batch_size = 1\n'
        "[parallelism]\ndata_parallel_shard_degree = 1\ntensor_parallel_degree = 2\n"
        "context_parallel_degree = 2\n"
    )
    _, config = understood(path)
    # ranks of context parallelism shard states, too
    assert (config.sharding.strategy, config.data.global_batch) == ("fsdp", 1)
    with pytest.raises(UserError, match=r"are for 4 GPUs, not 8: give --gpus 4, or correct them"):
        understood(path, "--gpus", "8")
    path.write_text(path.read_text() + "pipeline_parallel_degree = 2\n")
    assert "pipelines are not planned" in understood(path, "--gpus", "8")[0].left_out[0]


def test_tokens_of_torchtitan_are_of_the_sequences_that_are_planned(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b "
        "--training.steps 10 --training.max_context_length 8192 "
        "--training.num_tokens_per_microbatch_per_dp_rank 16384 "
        "--training.num_tokens_per_train_step -1\n"
    )
    for length, micro in (("8192", 2), ("4096", 4)):
        _, config = understood(path, "--seq-len", length)
        assert (config.data.micro_batch, config.data.global_batch) == (micro, 8 * micro)
