"""Plans for sequences that are cut over ranks: which cuts are tried, and what their ranks send."""

from typing import Any, cast

import pytest

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.forecast import plan_cli as cli
from launcher.forecast.candidates import choices
from launcher.forecast.collectives import sent_bytes
from launcher.forecast.dimensions import sequence_transfers
from launcher.forecast.traffic import Collective
from launcher.util.errors import ExitCode

SMALL = {"model": "nano", "heads": 4, "d_model": 64, "layers": 2, "precision": "bf16"}


def cuts(*, ranks: int = 8, per_node: int = 8, what: str = "context", **changes: Any) -> set[int]:
    """Over how many ranks sequences or matrices are cut, of all choices that cut nothing else."""
    config = RunConfig().replace(**{**SMALL, "activation_checkpointing": "full", **changes})
    found = choices(
        config,
        {*SMALL, "activation_checkpointing", *changes},
        world_size=ranks,
        ranks_per_node=per_node,
        device_type="cuda",
    )
    numbers = {"context": set[int](), "tensor": set[int]()}
    for choice in found:
        sharding = choice.runs[0].config.sharding
        cut = {"context": sharding.context_parallel, "tensor": sharding.tensor_parallel}
        own = {name for name, number in cut.items() if number > 1} or set(cut)
        for name in own:
            numbers[name].add(cut[name])
            assert choice.label.endswith(f"-{name}{cut[name]}") == (cut[name] > 1)
    return numbers[what]


def test_cuts_are_tried_for_long_sequences_within_a_node() -> None:
    long: dict[str, Any] = {"context": 16384, "seq_len": 16384}
    assert cuts(**long) == {1, 2, 4, 8}
    assert cuts(**long, per_node=4) == {1, 2, 4}
    assert cuts(**long, window=64) == {1, 2, 4}  # 8 ranks would be a ring, which knows no window
    assert cuts(context=2048, seq_len=2048) == {1}


def test_cuts_are_tried_where_there_are_fewer_sequences_than_ranks() -> None:
    assert cuts(context=256, seq_len=256, global_batch=4) == {2, 4, 8}
    assert cuts(context=256, seq_len=256, global_batch=8) == {1}


def test_matrices_are_cut_where_they_are_wide_and_heads_divide() -> None:
    wide: dict[str, Any] = {"d_model": 4096, "heads": 32, "what": "tensor"}
    assert cuts(**wide) == {1, 2, 4, 8}
    assert cuts(**wide, per_node=4) == {1, 2, 4}
    assert cuts(**wide, kv_heads=4) == {1, 2, 4}
    assert cuts(what="tensor") == {1}
    assert cuts(what="tensor", context=256, seq_len=256, global_batch=4) == {2, 4}


def test_the_command_has_the_cut(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "nano", "--context", "256", "--seq-len", "256", "--global-batch", "1"]
    where = ["--gpus", "2", "--gpu-memory", "24GiB", "--zero", "3", "--precision", "bf16"]
    assert cli.main([*flags, *where, "--activation-checkpointing", "full"]) == ExitCode.DONE
    assert "--context-parallel 2" in capsys.readouterr().out.splitlines()[-1]


def test_a_cut_over_nodes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "nano", "--micro-batch", "1", "--zero", "3", "--precision", "bf16"]
    flags += ["--activation-checkpointing", "full", "--context-parallel", "4"]
    where = ["--gpus", "4", "--gpus-per-node", "2", "--gpu-memory", "24GiB"]
    assert cli.main([*flags, *where]) == ExitCode.DONE
    assert "--context-parallel 2 stays within one" in capsys.readouterr().out


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_bytes_that_a_rank_sends(method: str, checkpointing: str) -> None:
    config = RunConfig().replace(
        **{**SMALL, "heads": 8, "kv_heads": 2, "seq_len": 64, "context": 64, "micro_batch": 3},
        context_parallel=4,
        context_parallel_method=method,
        activation_checkpointing=checkpointing,
    )
    run = resolve(config, world_size=4, device_type="cpu")
    found = sequence_transfers(run)
    sent = {
        part: sum(sent_bytes(cast(Collective, t.kind), t.size_bytes, 4) for t in transfers)
        for part, transfers in found.items()
    }
    tokens, element, layers = 3 * 64 // 4, 2, 2
    if method == "ulysses":
        # Three quarters of q, of 4 heads of k and of v (each of 2 twice), and of the output.
        forward = layers * tokens * element * (2 * 64 + 2 * 4 * 8) * 3 / 4
        backward = forward
    else:
        # k and v of 2 heads, to each of 3 others; back with their gradients in fp32.
        forward = layers * tokens * element * 2 * 2 * 8 * 3
        backward = 3 * forward
    assert sent["forward"] == forward
    assert sent["backward"] == backward + (forward if checkpointing == "full" else 0)
