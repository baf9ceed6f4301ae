"""Out of memory, and what would have fitted: the run that takes the first suggestion completes."""

import json
import shlex
import subprocess
from pathlib import Path

import harness
import pytest

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.forecast.budget import within_budget
from launcher.forecast.fit import TIGHT_FROM, Room, needed_bytes
from launcher.forecast.machine import Machine
from launcher.forecast.order import Merit, best_first, simplicity
from launcher.forecast.suggestions import Suggestion, suggest
from launcher.forecast.timing import step_seconds
from launcher.strategies import VARIANTS
from launcher.strategies.base import Variant
from launcher.util.flags import as_flags

MODEL = (
    "--layers=2 --d-model=128 --heads=4 --context=64 --vocab-size=257 --tokenizer=byte "
    "--report-to none"
)
A100 = "NVIDIA A100-SXM4-40GB"


def resolved(flags: str, ranks: int, device_type: str = "cpu") -> Resolved:
    return resolve(
        parse_run_config(f"{MODEL} {flags}".split()), world_size=ranks, device_type=device_type
    )


def suggestions_for(flags: str, ranks: int, room: Room) -> list[Suggestion]:
    failed = resolved(flags, ranks, room.device_type)
    return suggest(failed, room, ranks_per_node=ranks)


def test_a_run_that_takes_the_suggestion_completes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text() * 5)
    flags = f"{MODEL} --device=cpu --data={text} --micro-batch=64 --steps=3 --memory-limit=70MiB"

    def train(out: Path, more: str) -> "subprocess.CompletedProcess[str]":
        return harness.train(1, *shlex.split(flags), f"--out={out}", *shlex.split(more))

    failed = train(tmp_path / "failed", "")
    assert failed.returncode == 3, failed.stderr
    lines = failed.stderr.splitlines()
    said = [line.removeprefix("shardscale: would fit: ") for line in lines if "would fit" in line]
    assert 1 <= len(said) <= 3
    report = next(i for i, line in enumerate(lines) if "out of memory on rank 0" in line)
    assert report < next(i for i, line in enumerate(lines) if "would fit" in line)
    status = json.loads((tmp_path / "failed" / "status.json").read_text())
    assert status["state"] == "oom"
    assert [f"{one['flags']} (" in said[i] for i, one in enumerate(status["detail"]["suggestions"])]
    done = train(tmp_path / "advised", said[0].partition(" (")[0])
    assert done.returncode == 0, done.stderr
    assert "3 steps of 64 x 64 tokens" in done.stdout  # the same global batch


@pytest.mark.parametrize("kept", ["every=2", "keep=qkv", "budget=20MiB"])
def test_blocks_that_keep_a_part_are_advised_to_keep_nothing(kept: str) -> None:
    flags = f"--micro-batch=64 --loss-chunk=256 --activation-checkpointing={kept}"
    room = Room(size_bytes=67 * 2**20, gpu=None, capped=True)
    failed = within_budget(resolved(flags, 1))
    found = [one.flags for one in suggest(failed, room, ranks_per_node=1)]
    assert "--activation-checkpointing full" in found


def test_scores_that_attention_need_not_hold_are_advised_against() -> None:
    shape = "--context=2048 --micro-batch=1 --precision=bf16"
    failed = resolved(f"{shape} --attention=eager", 1, "cuda")
    needed = needed_bytes(failed, Room(size_bytes=2**36, gpu=A100, capped=False))
    room = Room(size_bytes=needed * 2 // 3, gpu=A100, capped=False)
    first = suggest(failed, room, ranks_per_node=1)[0]
    assert first.flags == "--attention auto"


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_every_suggestion_fits_and_keeps_the_global_batch(strategy: str, ranks: int) -> None:
    flags = f"--strategy={strategy} --micro-batch=64"
    room = Room(size_bytes=70 * 2**20, gpu=None, capped=True)
    found = suggestions_for(flags, ranks, room)
    assert found
    assert found[0].flags.startswith("--micro-batch ")
    for one in found:
        # pasted behind the flags that failed
        run = resolved(f"{flags} {one.flags}", ranks)
        assert run.global_batch == 64 * ranks
        assert needed_bytes(run, room) <= one.needed_bytes
        assert one.needed_bytes <= TIGHT_FROM * room.size_bytes
        assert one.slower is None  # of a CPU without a profile nothing is known


def test_on_a_known_gpu_the_cheapest_comes_first() -> None:
    flags = "--micro-batch=256 --precision=fp32"
    size_bytes = needed_bytes(
        resolved(flags, 2, "cuda"), Room(size_bytes=2**40, gpu=A100, capped=True)
    )
    found = suggestions_for(flags, 2, Room(size_bytes=int(0.8 * size_bytes), gpu=A100, capped=True))
    costs = [one.slower for one in found if one.slower is not None]
    assert len(costs) == len(found) == 3
    assert costs[0] == min(costs)
    assert all("slower)" in one.line() or "faster)" in one.line() for one in found)


def test_blocks_that_were_tested_are_advised_to_be_compiled() -> None:
    flags = "--micro-batch=64 --precision=bf16 --d-model=512 --layers=8"
    failed, compiled = resolved(flags, 1, "cuda"), resolved(f"{flags} --compile", 1, "cuda")
    assert not failed.config.loop.compiles  # 300 small steps do not pay for it
    room = Room(size_bytes=2**40, gpu=A100, capped=True)
    before, after = (needed_bytes(run, room) for run in (failed, compiled))
    assert after < 0.85 * before
    tight = Room(size_bytes=int(after / 0.85), gpu=A100, capped=True)
    found = [one.flags for one in suggest(failed, tight, ranks_per_node=1)]
    assert "--compile" in found


def test_suggestions_are_in_the_order_of_a_plan() -> None:
    ranks = 4
    flags = "--strategy=ddp --micro-batch=4 --precision=bf16 --d-model=1024 --layers=8"
    failed = resolved(flags, ranks, "cuda")
    needed = needed_bytes(failed, Room(size_bytes=2**40, gpu=A100, capped=True))
    room = Room(size_bytes=int(0.9 * needed), gpu=A100, capped=True)
    found = suggest(failed, room, ranks_per_node=ranks)
    machine = Machine.of_gpu("A100-40GB", ranks_per_node=ranks)
    merits = []
    for one in found:
        run = resolved(f"{flags} {one.flags}", ranks, "cuda")
        time = step_seconds(run, gpus_per_node=ranks, machine=machine)
        merits.append(
            Merit(
                verdict="fits",
                tokens_per_s=time.tokens_per_s,
                used_bytes=one.needed_bytes,
                simplicity=simplicity(run.config),
            )
        )
    assert best_first(merits) == list(range(len(found)))
    assert len(found) > 1


def test_adapters_are_proposed_where_a_model_is_fine_tuned(tmp_path: Path) -> None:
    scratch = parse_run_config([*MODEL.split(), "--micro-batch=2", "--d-model=512"])
    failed = resolve(scratch, world_size=1, device_type="cpu")
    whole_bytes = needed_bytes(failed, Room(size_bytes=2**40, gpu=None, capped=True))
    room = Room(size_bytes=int(0.7 * whole_bytes), gpu=None, capped=True)
    flags: dict[bool, list[str]] = {}
    for begun in (False, True):
        config = scratch.replace(init_from=tmp_path) if begun else scratch
        failed = resolve(config, world_size=1, device_type="cpu")
        found = suggest(failed, room, ranks_per_node=1)
        flags[begun] = [one.flags for one in found]
        for one in found:
            if one.flags == "--lora-rank 8":
                assert one.needed_bytes < 0.5 * whole_bytes
    assert "--lora-rank 8" in flags[True]
    assert not any("lora" in one for one in flags[False])


def test_of_a_run_with_adapters_the_base_is_quantised(tmp_path: Path) -> None:
    flags = [*MODEL.split(), "--micro-batch=1", "--seq-len=16", "--d-model=512", "--lora-rank=8"]
    config = parse_run_config([*flags, "--precision=bf16"]).replace(init_from=tmp_path)
    failed = resolve(config, world_size=1, device_type="cpu")
    needed = needed_bytes(failed, Room(size_bytes=2**40, gpu=None, capped=True))
    room = Room(size_bytes=int(0.97 * needed), gpu=None, capped=True)
    found = [one.flags for one in suggest(failed, room, ranks_per_node=1)]
    assert any("--quantize-base" in one for one in found)


def test_where_nothing_helps_nothing_is_said() -> None:
    room = Room(size_bytes=2**20, gpu=None, capped=True)
    assert suggestions_for("--micro-batch=1", 1, room) == []


def test_a_run_that_should_have_fitted_teaches_caution() -> None:
    """It ran out of memory, so that a prediction as high as its own cannot be believed."""
    flags = "--micro-batch=64"
    needed = needed_bytes(resolved(flags, 1), Room(size_bytes=2**40, gpu=None, capped=True))
    room = Room(size_bytes=2 * needed, gpu=None, capped=True)
    for one in suggestions_for(flags, 1, room):
        run = resolved(f"{flags} {one.flags}", 1)
        assert one.needed_bytes >= 1.9 * needed_bytes(run, room)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda variant: variant.label)
def test_what_chooses_a_variant_can_be_pasted(variant: Variant) -> None:
    config = parse_run_config(as_flags(variant.fields).split())
    assert {name: config.flat()[name] for name in variant.fields} == dict(variant.fields)
