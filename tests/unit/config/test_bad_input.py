"""Every mistake of a user is one sentence with the value and the fix, exit code 2, nothing made.

The table runs in one process that imports the trainer once and forks per case: each case is the
real `launcher.train`, as rank 0 of a world in which nobody else is there. So a case that got as
far as a process group could not end with exit code 2. Some are given to `torchrun`, too, whose
agent rejects them before it starts ranks.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REFUSED = 2
TORCHRUN = Path(sys.executable).parent / "torchrun"
PROGRESS = "data: "  # reading a corpus takes time, so stderr says what is being done

FORK_PER_CASE = """
import gc, json, os, sys, traceback
import launcher.torchrun
import launcher.train
import torch.distributed.run

gc.freeze()
for case in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        os.chdir(case["folder"])
        os.environ.update(case["environment"])
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(case[name], os.O_WRONLY | os.O_CREAT), number)
        try:
            if case["agent"]:
                sys.argv = ["torchrun", *case["agent"], *case["argv"]]
                launcher.torchrun.command()
            launcher.train.main(case["argv"])
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(99)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    argv: str
    says: tuple[str, ...]
    files: dict[str, str | bytes] = field(default_factory=dict)
    ranks: int = 2


def case(argv: str, *says: str, ranks: int = 2, **files: str | bytes) -> Case:
    """`c_yaml="..."` makes a file c.yaml."""
    named = {name.replace("_", "."): content for name, content in files.items()}
    return Case(argv=argv, says=says, files=named, ranks=ranks)


def yaml_case(content: str | bytes, *says: str, argv: str = "") -> Case:
    return case(f"--config c.yaml {argv}", "c.yaml", *says, c_yaml=content)


def deepspeed_case(content: object, *says: str, argv: str = "") -> Case:
    return case(f"--deepspeed ds.json {argv}", "ds.json", *says, ds_json=json.dumps(content))


TEXT = "\n\n".join(f"Paragraph {number} says very little about anything." for number in range(500))
BYTES = "--tokenizer byte --vocab-size 257 --context 16"

CASES = {
    # flags
    "unknown flag": case("--stepz 3", "--stepz", "did you mean --steps?"),
    "unknown flag, near one with a dash": case("--microbatch 3", "did you mean --micro-batch?"),
    "unknown flag, near nothing": case("--wat 3", "--wat", "--help all lists them"),
    "short flag": case("-z 3", "-z", "--help"),
    "stray word": case("--steps 5 extra", "'extra'", "--NAME VALUE"),
    "value too many": case("--betas 0.9 0.9 0.8", "'0.8'", "--NAME VALUE"),
    "value missing": case("--steps --zero 2", "--steps needs a value: a whole number"),
    "value empty": case("--data ''", "--data ''", "must be text"),
    "word for a number": case("--lr fast", "--lr fast must be a number"),
    "word for a whole number": case("--steps ten", "--steps ten must be a whole number"),
    "fraction for a whole number": case("--steps 2.5", "--steps 2.5 must be a whole number"),
    "negative number": case("--lr -1e-3", "--lr -0.001 must be more than 0"),
    "not a number": case("--lr nan", "--lr nan must be more than 0"),
    "infinite": case("--epochs inf", "--epochs inf must be at most 1,000,000,000"),
    "zero steps": case("--steps 0", "--steps 0 must be more than 0"),
    "one of two numbers": case("--betas 0.9", "--betas needs a value: 2 numbers"),
    "beta of 1.5": case("--betas 0.9 1.5", "--betas has 1.5", "below 1"),
    "unknown logger": case(
        "--report-to tensorboard,comet", "--report-to 'comet'", "tensorboard, wandb"
    ),
    "value for a switch": case("--memory-trace=yes", "--memory-trace yes", "True or False"),
    "bool given a string": case("--compile maybe", "--compile maybe must be on, off or auto"),
    "negative clip": case("--clip -1", "--clip -1.0 must be 0 or more"),
    "ratio above 1": case("--min-lr-ratio 2", "--min-lr-ratio 2.0", "between 0 and 1"),
    "negative seed": case("--seed -1", "--seed -1", "between 0 and 2^63 - 1"),
    "warm-up beyond the schedule": case(
        "--warmup-steps 301", "--warmup-steps 301", "300 steps", "use at most 300, or more --steps"
    ),
    "steps and epochs": case("--steps 5 --epochs 2", "--steps 5", "--epochs 2.0", "give one"),
    # model
    "unknown model": case("--model gpt5", "'gpt5'", "gpt-j-6b"),
    "heads not dividing d": case("--heads 5", "5 heads", "d_model 192", "4 or 6 heads"),
    "window larger than context": case("--window 500", "window 500", "context of 128"),
    "dropout of 1": case("--dropout 1", "dropout 1.0", "use 0"),
    "no layers": case("--layers 0", "layers 0", "1 or more"),
    "unknown attention": case("--attention xformers", "xformers", "one of auto, eager, sdpa"),
    "seq-len > context": case("--seq-len 500", "--seq-len 500", "128 or less", "--context 500"),
    # batch and sharding
    "batch that does not divide": case(
        "--global-batch 31", "--global-batch 31", "1 x 2 ranks = 2", "use --global-batch 30"
    ),
    "micro-batch of 0": case("--micro-batch 0", "--micro-batch 0 must be more than 0"),
    "zero stage 4": case("--zero 4", "--zero 4 must be one of 0, 1, 2, 3"),
    "unknown strategy": case("--strategy tp", "--strategy tp", "one of single, ddp, fsdp, zero"),
    "zero without stage": case("--strategy zero", "--strategy zero", "--zero 0, 1, 2 or 3"),
    "zero and fsdp": case("--zero 2 --strategy fsdp", "--zero 2", "--strategy fsdp", "give one"),
    "single on two ranks": case("--strategy single", "there are 2", "add --strategy ddp"),
    "param offload with zero 2": case(
        "--offload-param cpu --zero 2", "--offload-param cpu", "or --zero 3, not --zero 2"
    ),
    "optimizer offload with zero 0": case(
        "--offload-optimizer cpu --zero 0", "--offload-optimizer cpu", "--zero 3, not --zero 0"
    ),
    "offload under ddp": case(
        "--offload-optimizer cpu", "cpu", "--zero 2 or --zero 3", "not --strategy ddp"
    ),
    "resume from nothing": case("--resume nowhere", "nowhere", "does not exist"),
    "sample every -1": case("--sample-every -1", "--sample-every -1 must be 0 or more"),
    "no size": case("--memory-limit 5x", "--memory-limit '5x'", "24GiB"),
    "nvme offload at stage 2": case(
        "--offload-optimizer nvme --zero 2",
        "--offload-optimizer nvme",
        "not --zero 2",
        "leave it out",
    ),
    "nvme offload under fsdp": case(
        "--offload-param nvme --strategy fsdp", "--offload-param nvme", "not --strategy fsdp"
    ),
    "nvme offload without a folder": case(
        "--offload-optimizer nvme --zero 3", "--offload-optimizer nvme", "needs --nvme-path"
    ),
    "nvme parameters in fp32": case(
        "--offload-param nvme --zero 3 --nvme-path .", "--offload-param nvme", "--precision bf16"
    ),
    "removed": case("--max-skipped-steps 5", "--max-skipped-steps was removed", "20 skipped steps"),
    "activation offload on a CPU": case(
        "--activation-checkpointing offload", "--activation-checkpointing offload", "use full"
    ),
    "every block of one": case("--activation-checkpointing every=1", "every=1", "use every=2"),
    "every xth block": case("--activation-checkpointing every=x", "every=x", "whole number"),
    "every block beyond the last": case(
        "--layers 4 --activation-checkpointing every=5", "every=5", "use 2 to 4, or full"
    ),
    "no such product": case(
        "--activation-checkpointing keep=qkv,foo", "'foo'", "qkv, attention, proj, mlp-up"
    ),
    "no budget": case("--activation-checkpointing budget=0", "budget=0", "budget=8GiB"),
    "a budget below the least": case(
        "--activation-checkpointing budget=1KiB", "budget=1KiB", "give at least budget="
    ),
    "a budget of what a compiler keeps": case(
        "--activation-checkpointing budget=1GiB --compile", "with --compile", "use keep="
    ),
    "a budget beside tiles": case(
        "--activation-checkpointing budget=1GiB --mlp-tile 8", "--mlp-tile 8", "use keep="
    ),
    "a tile that is kept": case(
        "--activation-checkpointing keep=mlp-up --mlp-tile 8", "--mlp-tile 8", "leave one"
    ),
    "attention that draws and is kept": case(
        "--activation-checkpointing keep=attention --dropout 0.1",
        "--dropout 0.1",
        "leave attention",
    ),
    "blocks named that are not there": case(
        "--layers 4 --activation-checkpointing full:3/none:2", "5 blocks", "name each once"
    ),
    "replicate not dividing": case(
        "--replicate 3 --strategy fsdp", "--replicate 3", "2 ranks", "use one of 1, 2"
    ),
    "replicate without fsdp": case("--replicate 2", "--replicate 2", "--strategy fsdp"),
    "grad-op without fsdp": case("--no-reshard-after-forward --zero 3", "fsdp, not zero"),
    "bf16 accumulation in fp32": case(
        "--grad-accum-dtype bf16 --zero 2", "--grad-accum-dtype bf16", "--precision bf16"
    ),
    "fp16 on a device without it": case(
        "--precision fp16 --zero 2", "--precision fp16", "on GPUs only"
    ),
    "fp8 on a device without it": case("--precision fp8", "--precision fp8", "GPU"),
    "more ranks than GPUs": case("--device cuda", "for 4096 ranks", "--device cpu", ranks=4096),
    "unknown device": case("--device tpu", "--device tpu", "one of auto, cpu, cuda"),
    # DeepSpeed files
    "missing DeepSpeed file": case("--deepspeed no.json", "no.json", "check the path"),
    "folder as DeepSpeed file": case("--deepspeed .", "Is a directory", "give a JSON file"),
    "damaged DeepSpeed file": case("--deepspeed d.json", "d.json", "line 1 column 2", d_json="{"),
    "DeepSpeed list": deepspeed_case([1], "holds [1]", "must be a JSON object"),
    "DeepSpeed stage 4": deepspeed_case(
        {"zero_optimization": {"stage": 4}}, "stage is 4", "must be 0, 1, 2 or 3"
    ),
    "DeepSpeed section of a wrong type": deepspeed_case(
        {"zero_optimization": 2}, "zero_optimization is 2", "must be a JSON object"
    ),
    "DeepSpeed stage against the flag": deepspeed_case(
        {"zero_optimization": {"stage": 2}}, "stage is 2", "--zero is 3", argv="--zero 3"
    ),
    "DeepSpeed values against the flags": deepspeed_case(
        {"train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": True}, "pipeline": {"stages": 2}},
        *("is 4, but --micro-batch is 8", "fp16.enabled is true, but --precision is bf16"),
        "pipeline",
        argv="--zero 2 --micro-batch 8 --precision bf16",
    ),
    "DeepSpeed fp16 on a CPU": case(
        "--deepspeed ds.json --zero 2",
        *("--precision fp16", "GPUs only"),
        ds_json='{"fp16": {"enabled": true}}',
    ),
    "DeepSpeed file without a stage": deepspeed_case(
        {}, "has no zero_optimization.stage", "give --zero"
    ),
    "DeepSpeed nvme": case(
        "--deepspeed ds.json",
        *("--offload-param nvme", "needs --nvme-path"),
        ds_json='{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
    ),
    "DeepSpeed file under fsdp": deepspeed_case({}, "not fsdp", argv="--strategy fsdp"),
    # YAML
    "missing config": case("--config no.yaml", "no.yaml", "check the path"),
    "config without a name": case("--config --zero 2", "--config needs a file name"),
    "two configs": case("--config a.yaml --config b.yaml", "a.yaml and b.yaml", "give one"),
    "invalid YAML": yaml_case("steps: [1", "not valid YAML", "line 1, column 10"),
    "YAML list": yaml_case("- 1\n- 2", "holds [1, 2]", "key: value"),
    "YAML text": yaml_case("hello", "holds 'hello'", "key: value"),
    "YAML in UTF-16": yaml_case("steps: 3".encode("utf-16"), "0xff", "save it as UTF-8"),
    "unknown YAML key": yaml_case("stepz: 3", "'stepz'", "did you mean steps?"),
    "YAML section": yaml_case(
        "training:\n  steps: 3", "unknown key 'training': write the keys below", "left margin"
    ),
    "YAML number as key": yaml_case("1: 3", "unknown key 1", "--help all lists them"),
    "YAML text for a whole number": yaml_case("steps: ten", "steps is 'ten'", "a whole number"),
    "YAML fraction for a whole number": yaml_case("steps: 2.5", "is 2.5", "a whole number"),
    "YAML bool for a whole number": yaml_case("steps: true", "is True", "a whole number"),
    "YAML list for a whole number": yaml_case("steps: [1, 2]", "is [1, 2]", "a whole number"),
    "YAML mapping for text": yaml_case("model: {layers: 2}", "{'layers': 2}", "be text"),
    "YAML number for text": yaml_case("data: 3", "data is 3", "text, in quotes"),
    "YAML bool for a number": yaml_case("lr: true", "lr is True", "a number"),
    "YAML text for a bool": yaml_case("memory_trace: 'yes'", "'yes'", "true or false"),
    "YAML number for a bool": yaml_case("tied: 1", "tied is 1", "on, off or auto"),
    "YAML number for two": yaml_case("betas: 0.9", "betas is 0.9", "[0.9, 0.95]"),
    "YAML choice": yaml_case("zero: 4", "zero is 4", "one of 0, 1, 2, 3"),
    "YAML out of range": case("--config a.yaml", "--steps 0", "more than 0", a_yaml="steps: 0"),
    "YAML type beside a flag": yaml_case("heads: many", "heads is 'many'", argv="--steps 3"),
    # data
    "missing file": case("--data no.txt", "no.txt does not exist", "hf:NAME"),
    "unknown dataset": case("--data wikitext", "--data wikitext does not exist", "stdlib"),
    "unread suffix": case("--data a.csv", "'.csv'", ".parquet", a_csv="a,b"),
    "empty corpus": case("--data a.txt", "a.txt has 0 documents", "give a longer text", a_txt=""),
    "corpus shorter than one sequence": case(
        f"--data a.txt {BYTES} --context 900",
        *("a.txt", "--seq-len 900", "a shorter --seq-len"),
        a_txt="word " * 1000,
    ),
    "unreadable parquet": case("--data a.parquet", "a.parquet", "again", a_parquet=b"PAR1?PAR1"),
    "text that is not UTF-8": case("--data a.txt", "0xff", "iconv", a_txt=b"\xff\xfe\0a" * 99),
    "JSON lines without text": case(
        "--data a.jsonl", "line 1", "'text'", "--data-field", a_jsonl='{"body": "x"}\n'
    ),
    "token id beyond the vocabulary": case(
        f"--data a.txt {BYTES} --vocab-size 200",
        *("token id 256", "vocabulary of 200", "257 or more"),
        a_txt=TEXT,
    ),
    "vocabulary too small for BPE": case("--vocab-size 100", "100", "at least 257"),
    "missing tokenizer": case("--data a.txt --tokenizer no.json", "'no.json'", "bpe", a_txt=TEXT),
    "damaged tokenizer": case(
        "--data a.txt --tokenizer t.json", "t.json", "or give bpe", a_txt=TEXT, t_json="{}"
    ),
    # the run folder
    "existing run folder": case("--out there", "--out there", "choose another", there="a file"),
    "file as parent": case("--out file/run", "is a file", "choose another place", file="a file"),
    "read-only place": case("--out /proc/run", "/proc cannot be written", "choose another place"),
}
THROUGH_TORCHRUN = (
    "unknown flag",
    "batch that does not divide",
    "param offload with zero 2",
    "unknown YAML key",
    "empty corpus",
    "existing run folder",
)


Asked = tuple[str, bool]
"""A case, and whether torchrun was given it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    stdout: str
    stderr: str


def lay_out(one: Case, folder: Path) -> None:
    folder.mkdir()
    for name, content in one.files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def environment(one: Case) -> dict[str, str]:
    ranks = str(one.ranks)
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Asked, tuple[Path, Outcome]]:
    root = tmp_path_factory.mktemp("bad")
    (root / "outputs").mkdir()
    jobs: list[dict[str, Any]] = []
    agent = ["--nproc", "2", "-m", "launcher.train"]
    asked = [*CASES, *THROUGH_TORCHRUN]
    for number, name in enumerate(asked):
        one, alone = CASES[name], number < len(CASES)
        lay_out(one, root / str(number))
        cache = {"SHARDSCALE_CACHE": str(root / ("cache" if alone else "agents"))}
        jobs.append(
            {
                "argv": shlex.split(one.argv),
                "agent": [] if alone else agent,
                "folder": str(root / str(number)),
                "environment": environment(one) | cache if alone else cache,
                "stdout": str(root / "outputs" / f"{number}.out"),
                "stderr": str(root / "outputs" / f"{number}.err"),
            }
        )
    done = subprocess.run(
        [sys.executable, "-c", FORK_PER_CASE],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    codes = map(int, done.stdout.split())
    return {
        (name, bool(job["agent"])): (
            Path(job["folder"]),
            Outcome(
                code=code,
                stdout=Path(job["stdout"]).read_text(),
                stderr=Path(job["stderr"]).read_text(),
            ),
        )
        for name, job, code in zip(asked, jobs, codes, strict=True)
    }


def check(one: Case, folder: Path, outcome: Outcome) -> None:
    assert outcome.code == REFUSED, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert outcome.stdout == ""
    *progress, sentence = outcome.stderr.splitlines()
    assert all(line.startswith(PROGRESS) for line in progress)
    assert not progress or "--data" in one.argv
    assert sentence.startswith("shardscale: ")
    assert [word for word in one.says if word not in sentence] == [], sentence
    assert sorted(os.listdir(folder)) == sorted(one.files)


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_sentence(name: str, outcomes: dict[Asked, tuple[Path, Outcome]]) -> None:
    folder, outcome = outcomes[name, False]
    check(CASES[name], folder, outcome)


@pytest.mark.parametrize("name", THROUGH_TORCHRUN)
def test_refused_once_for_all_ranks(name: str, outcomes: dict[Asked, tuple[Path, Outcome]]) -> None:
    folder, outcome = outcomes[name, True]
    check(CASES[name], folder, outcome)


def test_torchrun_itself_is_refused(tmp_path: Path) -> None:
    one = CASES["empty corpus"]
    folder = tmp_path / "here"
    lay_out(one, folder)
    done = subprocess.run(
        [TORCHRUN, "--nproc", "2", "-m", "launcher.train", *shlex.split(one.argv)],
        cwd=folder,
        env={**os.environ, "SHARDSCALE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    check(one, folder, Outcome(code=done.returncode, stdout=done.stdout, stderr=done.stderr))


@pytest.mark.parametrize(("local_rank", "said"), [("0", 1), ("1", 0)])
def test_one_rank_of_each_node_speaks(local_rank: str, said: int, tmp_path: Path) -> None:
    """Started without torchrun, a node that is rejected alone would leave the others waiting."""
    done = subprocess.run(
        [sys.executable, "-m", "launcher.train", "--stepz", "3"],
        cwd=tmp_path,
        env={**os.environ, "RANK": "1", "LOCAL_RANK": local_rank, "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert done.stderr.count("unknown flag --stepz") == said
