"""Flags, the YAML file and the defaults: which wins, and what survives on the way."""

import dataclasses
import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
import yaml

from launcher.config.arguments import parse_run_config
from launcher.config.foreign_names import FOREIGN
from launcher.config.help_lines import ABOUT, FIRST, LINES
from launcher.config.help_text import WIDTH, help_text
from launcher.config.old_names import REMOVED
from launcher.config.schema import RunConfig, field_types
from launcher.model.checkpointing import parse
from launcher.util.errors import UserError
from launcher.util.flags import as_flags, flag

NOT_DEFAULT: dict[str, str] = {
    "model": "gpt2",
    "tied": "False",
    "dropout": "0.25",
    "betas": "0.5 0.75",
    "lr": "3e-4",
    "min_lr_ratio": "0.5",
    "warmup_steps": "0.5",
    "eps": "1e-6",
    "epochs": "1.5",
    "max_minutes": "2.5",
    "collective_timeout_s": "12.5",
    "data": "a folder/of text",
    "tokenizer": "byte",
    "out": "runs/2026",
    "deepspeed": "ds.json",
    "heads": "3",
    "activation": "relu",
    "position": "rope",
    "rope_scaling": "8 1 4 64",
    "norm": "rms",
    "qk_norm": "True",
    "bias": "qkv,mlp",
    "init_from": "start",
    "mask_prompt": "False",
    "compile": "on",
    "cuda_graphs": "on",
    "attention": "eager",
    "report_to": "wandb",
    "activation_checkpointing": "full",
    "quantize_base": "nf4",
    "masks": "False",
    "strategy": "zero",
    "context_parallel_method": "ring",
    "grad_accum_dtype": "bf16",
    "offload_optimizer": "cpu",
    "offload_fraction": "0.5",
    "offload_param": "cpu",
    "precision": "bf16",
    "optimizer": "adam",
    "schedule": "wsd",
    "decoder": "transformers",
    "log_level": "error",
    "moments_dtype": "bf16",
    "momentum": "0.5",
    "device": "cpu",
}


def flags_for(name: str) -> list[str]:
    """The field's flag with a value that is not its default."""
    kind = field_types()[name]
    if kind is bool:
        default = RunConfig().flat()[name]
        return ["--no-" + flag(name)[2:] if default else flag(name)]
    if name == "data":
        return ["--data", NOT_DEFAULT["data"]]
    return [flag(name), *NOT_DEFAULT.get(name, "2").split()]


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.yaml").write_text("model: gpt2\nlayers: 2\n")
    return tmp_path / "run.yaml"


def test_flags_beat_the_file_and_the_file_beats_the_defaults(config_file: Path) -> None:
    config_file.write_text("micro_batch: 3\nlr: 0.5\n")
    config = parse_run_config(["--config", str(config_file), "--lr", "0.25"])
    assert config.optim.lr == 0.25
    assert config.data.micro_batch == 3
    assert config.optim.clip == RunConfig().optim.clip


def test_the_place_of_config_among_the_flags_does_not_matter(config_file: Path) -> None:
    config_file.write_text("lr: 0.5\nsteps: 7\n")
    before = parse_run_config([f"--config={config_file}", "--lr", "0.25"])
    after = parse_run_config(["--lr", "0.25", "--config", str(config_file)])
    assert before == after
    assert (before.optim.lr, before.loop.steps) == (0.25, 7)


def test_no_file_and_no_flags_are_the_defaults(config_file: Path) -> None:
    config_file.write_text("# nothing yet\n")
    assert parse_run_config([]) == RunConfig()
    assert parse_run_config(["--config", str(config_file)]) == RunConfig()


@pytest.mark.parametrize("spelling", ["--micro-batch", "--micro_batch"])
def test_both_spellings(spelling: str) -> None:
    assert parse_run_config([spelling, "5"]).data.micro_batch == 5
    assert parse_run_config([f"{spelling}=6"]).data.micro_batch == 6


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--tied"], True),
        (["--no-tied"], False),
        (["--tied", "False"], False),
        (["--tied=True"], True),
        (["--tied", "--steps", "3"], True),
        ([], None),
    ],
)
def test_a_switch_that_the_model_may_decide(argv: list[str], expected: bool | None) -> None:
    assert parse_run_config(argv).model.tied is expected


def test_negative_and_scientific_numbers_are_values() -> None:
    assert parse_run_config(["--lr", "1e-3"]).optim.lr == 1e-3
    assert parse_run_config(["--loss-chunk", "-1"]).model.loss_chunk == -1  # the model refuses it


def test_underscores_in_values_stay() -> None:
    assert str(parse_run_config(["--out", "my_run"]).loop.out) == "my_run"
    assert parse_run_config(["--data=my_text.txt"]).data.data == "my_text.txt"


@pytest.mark.parametrize(
    ("file", "argv", "expected"),
    [
        ("strategy: fsdp", "--zero 2", {"zero": 2, "strategy": None}),
        ("zero: 3", "--strategy ddp", {"zero": None, "strategy": "ddp"}),
        ("zero: 1", "--zero 2", {"zero": 2, "strategy": None}),
        ("deepspeed: ds.json", "--zero 3", {"zero": 3, "deepspeed": None}),
        ("zero: 1", "--deepspeed ds.json", {"zero": 2, "deepspeed": "ds.json"}),
        ("steps: 5", "--epochs 2", {"steps": None, "epochs": 2.0}),
        ("epochs: 2", "--steps 5", {"steps": 5, "epochs": None}),
        ("tied: true", "--no-tied", {"tied": False}),
        ("compile: true", "--no-compile", {"compile": False}),
        ("compile: true", "--compile auto", {"compile": None}),
        ("compile: false", "--compile", {"compile": True}),
        ("compile: auto", "", {"compile": None}),
        ("compile: on", "--compile off", {"compile": False}),
        ("compile: off", "--compile=on", {"compile": True}),
        ("compile: 'off'", "", {"compile": False}),  # as yaml.dump quotes it
        ("report_to: none", "--report-to tensorboard", {"report_to": "tensorboard"}),
        ("reshard_after_forward: false", "--strategy fsdp", {"reshard_after_forward": False}),
        ("test_batches: all", "", {"test_batches": "all"}),
        ("test_batches: 7", "", {"test_batches": 7}),
        ("test_batches: 7", "--test-batches all", {"test_batches": "all"}),
    ],
)
def test_a_flag_replaces_what_it_contradicts_in_the_file(
    file: str, argv: str, expected: dict[str, object], config_file: Path
) -> None:
    config_file.write_text(file)
    flat = parse_run_config(["--config", str(config_file), *argv.split()]).flat()
    assert {name: flat.get(name) for name in expected} == expected


def test_a_choice_of_checkpointing_has_one_spelling(config_file: Path) -> None:
    def read(text: str) -> str:
        return parse_run_config(["--activation-checkpointing", text]).model.activation_checkpointing

    assert read("keep=mlp-up,qkv,qkv") == "keep=qkv,mlp-up"
    assert read("keep=mlp-up,proj,attention,qkv") == "selective"
    assert read("every=02") == "every=2"
    assert read("full:3/full:1/none:2") == "full:4/none:2"
    config_file.write_text("activation_checkpointing: budget=1.5GiB\n")
    config = parse_run_config(["--config", str(config_file)])
    assert config.model.activation_checkpointing == "budget=1.5GiB"
    assert parse(config.flat()["activation_checkpointing"]).budget_bytes == 3 * 2**29


def test_yaml_writes_numbers_as_people_do(config_file: Path) -> None:
    config_file.write_text("lr: 1e-3\nbetas: [0.9, 0.99]\nepochs: 2\nclip: 0\ntied: no\nsteps:\n")
    config = parse_run_config(["--config", str(config_file)])
    assert config.optim.lr == 1e-3  # a string in YAML 1.1, which wants 1.0e-3
    assert config.optim.betas == (0.9, 0.99)
    assert (config.loop.epochs, config.optim.clip, config.loop.steps) == (2.0, 0.0, None)
    assert config.model.tied is False


@pytest.mark.parametrize("name", field_types())
def test_every_field_makes_the_round_trip_through_yaml(name: str, config_file: Path) -> None:
    config = parse_run_config(flags_for(name))
    assert config != RunConfig(), "this test has to set something else than the default"
    config_file.write_text(yaml.safe_dump(config.flat(), sort_keys=False))
    assert parse_run_config(["--config", str(config_file)]) == config


@pytest.mark.parametrize("left_out", ["steps", "epochs"])
def test_all_fields_at_once_make_the_round_trip(left_out: str, config_file: Path) -> None:
    # --init-from sets the shape itself.
    names = [name for name in field_types() if name not in (left_out, "init_from")]
    config = parse_run_config([token for name in names for token in flags_for(name)])
    config_file.write_text(yaml.safe_dump(config.flat(), sort_keys=False))
    assert set(yaml.safe_load(config_file.read_text())) == set(names)
    assert parse_run_config(["--config", str(config_file)]) == config


def test_replace_reaches_every_section() -> None:
    changed = RunConfig().replace(layers=2, micro_batch=3, zero=1, lr=0.5, steps=4)
    assert changed.flat() == RunConfig().flat() | {
        "layers": 2,
        "micro_batch": 3,
        "zero": 1,
        "lr": 0.5,
        "steps": 4,
    }


def test_flat_names_are_unique() -> None:
    sections = [type(getattr(RunConfig(), f.name)) for f in dataclasses.fields(RunConfig)]
    names = [f.name for section in sections for f in dataclasses.fields(section)]
    assert sorted(names) == sorted(field_types())
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", [*field_types(), "config"])
def test_plain_torchrun_lets_every_flag_through(name: str) -> None:
    # Its parser refuses a program's flag that is an ambiguous prefix of its own, as `--start` is.
    tokens = ["--config", "run.yaml"] if name == "config" else flags_for(name)
    args = torch.distributed.run.parse_args(
        ["--nproc-per-node", "2", "-m", "launcher.train", *tokens]
    )
    assert args.training_script_args == tokens


def test_the_first_screen_of_help_fits_a_terminal() -> None:
    shown = help_text(None).splitlines()
    assert len(shown) <= 40
    assert len(FIRST) == 10
    assert all(any(f"  {flag(name)} " in line for line in shown) for name in FIRST)
    assert LINES.keys() == ABOUT.keys()


def test_help_has_one_line_for_every_flag() -> None:
    shown = help_text("all").splitlines()
    assert max(map(len, [*shown, *help_text(None).splitlines()])) <= WIDTH
    by_group = [line for group in LINES for line in help_text(group).splitlines()]
    for name, default in (dict.fromkeys(field_types()) | RunConfig().flat()).items():
        spelled = flag(f"no_{name}" if default is True else name)
        (line,) = [line for line in shown if line.startswith(f"  {spelled} ")]
        assert line in by_group
        assert len(line[29:].split()) >= 2, f"{spelled} is not explained"
        if default is not None and not isinstance(default, bool | list):
            assert f"[{default}]" in line


def test_help_on_a_group_with_the_name_of_a_flag_says_how_to_ask_for_the_flag() -> None:
    assert help_text("model").endswith("in full; --help --model the flag of this name.")
    assert help_text("--model") != help_text("model")
    assert help_text("memory").endswith("in full.")


def test_help_on_one_flag_is_all_that_is_known_of_it() -> None:
    for name in field_types():
        assert len(help_text(flag(name)).splitlines()) >= 3, name
    for spelled in ("micro-batch", "micro_batch", "--micro-batch"):
        assert "with a few real steps" in help_text(spelled)
    assert "FSDP: free gathered parameters" in help_text("no-reshard-after-forward")
    assert "values: cosine, linear, constant, wsd" in help_text("schedule")
    assert help_text("optimizer") != help_text("--optimizer")  # a group, and a flag
    with pytest.raises(UserError, match=r"^--help 'wat': give one of model, data, memory"):
        help_text("wat")


@pytest.mark.parametrize(
    ("argv", "shows", "code"),
    [
        ("--help", "Flags to start with", 0),
        ("--zero 2 -h --lr 1", "Flags to start with", 0),
        ("--help memory", "--offload-optimizer", 0),
        ("--help=--zero", "ZeRO stage; implies --strategy zero.", 0),
        ("--help --zero", "ZeRO stage; implies --strategy zero.", 0),
        ("--help wat", "", 2),
    ],
)
def test_help_is_asked_for_in_tiers(
    argv: str, shows: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_run_config(argv.split())
    assert end.value.code == code
    shown = capsys.readouterr()
    assert shows in shown.out
    assert (shown.err != "") == (code == 2)


@pytest.mark.parametrize("module", [("launcher.train",), ("launcher", "train")])
def test_a_reader_of_the_help_may_leave(module: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *module, "--help"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_old_name_is_read_and_the_new_one_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.config.old_names._noted", set())
    file = tmp_path / "run.yaml"
    file.write_text("sequence_method: ring\n")
    config = parse_run_config(["--sequence-parallel", "2", "--config", str(file)])
    assert config.sharding.context_parallel == 2
    assert config.sharding.context_parallel_method == "ring"
    assert capsys.readouterr().err.splitlines() == [
        "shardscale: --sequence-parallel is called --context-parallel now, and its old name goes "
        "with 0.4",
        "shardscale: sequence_method is called context_parallel_method now, and its old name goes "
        "with 0.4",
    ]


def test_a_removed_flag_is_read_where_another_does_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.config.old_names._noted", set())
    file = tmp_path / "run.yaml"
    file.write_text(
        "tensorboard: false\nsave_last: true\nbucket: 1000\nnvme_threads: 1\n"
        "warmup_ratio: 0.1\ntf32: true\nprecision: fp32\n"
    )
    config = parse_run_config(["--quiet", "--config", str(file)])
    assert (config.optim.warmup_steps, config.optim.precision) == (0.1, "tf32")
    assert config.loop.log_level == "warning"
    assert config.measure.loggers == ()
    assert config.loop.saves_last
    assert capsys.readouterr().err.splitlines() == [
        "shardscale: --quiet was removed and goes with 0.4: use --log-level warning",
        "shardscale: tensorboard False was removed: use --report-to none",
        "shardscale: bucket 1000 was removed, and is ignored: set "
        "zero_optimization.reduce_bucket_size in a --deepspeed file",
        "shardscale: warmup_ratio 0.1 was removed: use --warmup-steps with a fraction of the "
        "schedule",
        "shardscale: tf32 True was removed: use --precision tf32",
    ]


def test_each_removed_field_is_gone_and_named() -> None:
    for name, (default, instead, fields) in REMOVED.items():
        assert name not in field_types()
        assert fields.keys() <= field_types().keys()
        if not fields or not isinstance(default, bool):
            with pytest.raises(UserError, match=f"^{flag(name)} was removed: {instead[:9]}"):
                parse_run_config([flag(name), "1"])


def test_a_model_beside_init_from_must_be_the_same(config_file: Path) -> None:
    assert parse_run_config(["--init-from=start", "--model=gpt2", "--layers=2"]).model.layers == 2
    with pytest.raises(UserError) as refused:
        parse_run_config(["--init-from=start", "--model=gpt2-medium"])
    assert str(refused.value) == (
        "--model gpt2-medium (--layers 24 --heads 16 --kv-heads 16 --d-model 1024 --d-ff 4096) "
        "differs from --init-from start (--layers 2 --heads 12 --kv-heads 12 --d-model 768 --d-ff "
        "3072): leave --model out, or give a folder of that model"
    )


def test_a_name_of_the_hub_without_its_prefix_is_told_of_it(config_file: Path) -> None:
    with pytest.raises(UserError, match=r"org/tiny: is no folder, .* or hf:ORG/NAME$"):
        parse_run_config(["--init-from=org/tiny"])


def test_a_folders_adapters_are_continued_unless_flags_say_otherwise(config_file: Path) -> None:
    adapters = "lora_rank: 4\nlora_alpha: 16\nlora_targets: qkv\nquantize_base: nf4\n"
    with (config_file.parent / "start" / "config.yaml").open("a") as run:
        run.write(adapters)
    continued = parse_run_config(["--init-from=start"]).model
    assert (continued.lora_rank, continued.lora_alpha, continued.lora_targets) == (4, 16, "qkv")
    assert continued.quantize_base == "nf4"
    assert parse_run_config(["--init-from=start", "--lora-rank=4"]).model == continued
    flags = ["--lora-dropout=0.3", "--quantize-base=none"]
    changed = parse_run_config(["--init-from=start", *flags]).model
    assert (changed.lora_dropout, changed.quantize_base) == (0.3, "none")
    for other in ("--lora-alpha=64", "--lora-targets=all", "--rslora", "--lora-rank=8"):
        with pytest.raises(
            UserError, match=f"^{other[:8]}.* differs from --init-from start, whose"
        ):
            parse_run_config(["--init-from=start", other])
    with pytest.raises(UserError, match=r"^lora_alpha -1.0 must be above 0"):
        parse_run_config(["--init-from=start", "--lora-alpha=-1"])


def test_removed_fields_of_a_file_become_todays(config_file: Path) -> None:
    config_file.write_text("data_stream: 2GB\ndata: hf:NAME@train\nsdpa_backend: math\n")
    config = parse_run_config([f"--config={config_file}"])
    assert config.data.data == "hf:NAME@train[:2GB]"
    assert (config.model.build().attention, config.model.build().sdpa_backend) == ("sdpa", "math")


@pytest.mark.parametrize(
    ("attention", "qkv", "mlp", "bias"),
    [
        (None, None, None, None),
        (False, None, None, "none"),
        (False, None, True, "mlp"),
        (False, True, False, "qkv"),
        (None, True, None, "qkv"),
        (True, False, None, "proj"),
        (True, None, False, "qkv,proj"),
        (None, None, False, "qkv,proj"),
        (True, True, True, "all"),
    ],
)
def test_the_three_flags_of_biases_are_read_as_one(
    config_file: Path,
    attention: bool | None,
    qkv: bool | None,
    mlp: bool | None,
    bias: str | None,
) -> None:
    values = {"attention_bias": attention, "qkv_bias": qkv, "mlp_bias": mlp}
    config_file.write_text(yaml.safe_dump(values))
    assert parse_run_config([f"--config={config_file}"]).model.bias == bias
    flags = [as_flags({name: value}) for name, value in values.items() if value is not None]
    assert parse_run_config(flags).model.bias == bias
    spelled = [f"{flag(name)}={value}" for name, value in values.items() if value is not None]
    assert parse_run_config(spelled).model.bias == bias


@pytest.mark.parametrize("bias", ["qkv,qkv", "qkv,out", "all,mlp", "True"])
def test_biases_of_unknown_projections_are_refused(bias: str) -> None:
    with pytest.raises(UserError, match=f"^bias '{bias}' must name some of qkv, proj, mlp, once"):
        parse_run_config([f"--bias={bias}"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--attention-bias=maybe"],
        ["--mlp-bias="],
        ["--no-qkv-bias=True"],
        ["--bias=all", "--no-mlp-bias"],
    ],
)
def test_removed_flags_of_biases_with_other_values_are_refused(flags: list[str]) -> None:
    with pytest.raises(
        UserError, match=f"^{flags[-1]} was removed: use --bias qkv,proj,mlp alone$"
    ):
        parse_run_config(flags)


@pytest.mark.parametrize(
    "line", ["attention_bias: maybe", "mlp_bias: 3", "qkv_bias: true\nbias: all"]
)
def test_removed_fields_of_biases_with_other_values_are_refused(
    config_file: Path, line: str
) -> None:
    config_file.write_text(f"{line}\n")
    with pytest.raises(UserError, match=r"^--config \S+: has \w+_bias .+ was removed: use bias "):
        parse_run_config([f"--config={config_file}"])


def test_a_foreign_flag_is_answered_with_ours(config_file: Path) -> None:
    ours = {flag(name) for name in field_types()} | {flag(f"no_{name}") for name in field_types()}
    for name, answer in FOREIGN.items():
        assert name not in field_types()
        assert name not in REMOVED
        elsewhere = {"--gpus", "--nproc"}  # of plan and torchrun
        assert set(re.findall(r"--[a-z][a-z-]*", answer)) <= ours | elsewhere, name
        with pytest.raises(UserError) as refused:
            parse_run_config([flag(name), "1"])
        assert str(refused.value).startswith(f"unknown flag {flag(name)}: ")
        assert str(refused.value).endswith(answer)
    config_file.write_text("num_train_epochs: 3\n")
    with pytest.raises(UserError, match=r"unknown key 'num_train_epochs': use --epochs$"):
        parse_run_config(["--config", str(config_file)])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--strategy zero2 --zero 3", "--strategy zero2 means --zero 2, not --zero 3"),
        ("--strategy fsdp-hybrid", "give their number with --replicate"),
        ("--strategy ddp-grad-op", "must be one of single, ddp, fsdp, zero"),
    ],
)
def test_a_label_that_is_contradicted_or_unknown(argv: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_run_config(argv.split())


def test_names_are_read_in_any_capitals(config_file: Path) -> None:
    flags = ["--strategy", "ZeRO3+CPU", "--optimizer", "AdamW", "--precision", "BF16"]
    config = parse_run_config(flags)
    assert (config.sharding.zero, config.sharding.offload_optimizer) == (3, "cpu")
    assert (config.optim.optimizer, config.optim.precision) == ("adamw", "bf16")
    config_file.write_text("strategy: FSDP\n")
    assert parse_run_config(["--config", str(config_file)]).sharding.strategy == "fsdp"


def test_a_file_may_hold_a_label_and_a_flag_replaces_it(config_file: Path) -> None:
    config_file.write_text("strategy: fsdp-grad-op+each\n")
    read = parse_run_config(["--config", str(config_file)]).sharding
    assert (read.strategy, read.reshard_after_forward, read.reduce_each_micro_batch) == (
        *("fsdp", False, True),
    )
    replaced = parse_run_config(["--config", str(config_file), "--zero", "1"]).sharding
    assert (replaced.strategy, replaced.zero, replaced.reshard_after_forward) == (None, 1, True)


@pytest.mark.parametrize("flags", ["--model {}", "--model hf:{}", "--init-from {}", "--data {}"])
def test_a_folder_that_is_closed_is_one_sentence(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that can be seen, but not looked into: root, who may, runs tests."""
    look = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(UserError, match="Permission denied, give another path"):
        parse_run_config(flags.format(tmp_path).split())
