"""Programs of others take the way on the null GPU that they would take on a real one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from nullgpu.runs import MIB
from nullgpu.test_rehearse_programs import TORCHRUN, shardscale

PROGRAMS = Path(__file__).parent / "programs"


def rehearse(
    folder: Path, program: str, *flags: str, gpu: str = "H100", ranks: bool = False
) -> tuple[Any, list[str]]:
    """Return what a rehearsal found, and the lines that the program printed."""
    words = ("--gpu", gpu, "--json", "--out", str(folder / "run"), *flags, "--", sys.executable)
    start = TORCHRUN if ranks else ()
    done = shardscale("rehearse", *words, *start, str(PROGRAMS / program))
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr.splitlines()


def test_a_caught_out_of_memory_error_keeps_nothing(tmp_path: Path) -> None:
    found, lines = rehearse(tmp_path, "batch_search.py", gpu="A100-80GB")
    words = [line.split() for line in lines if line.startswith(("left ", "found "))]
    assert words[-1] == ["found", "65536"], lines[-10:]
    # Weights of 24 layers, and no activation of any.
    weights = 24 * 4 * 4097 * 4096
    assert int(words[0][1]) < weights + 64 * MIB
    assert found["steps"] == 1


def test_a_tensor_that_is_deleted_is_freed(tmp_path: Path) -> None:
    _, lines = rehearse(tmp_path, "lets_go.py")
    left = [int(line.split()[1]) for line in lines if line.startswith("allocated ")]
    assert 0 < max(left) < 100 * MIB  # of 1 GiB


@pytest.mark.parametrize("program", ["on_the_meta_device.py", "pipeline.py"])
def test_ranks_agree_on_values_that_a_library_sends(program: str, tmp_path: Path) -> None:
    found, lines = rehearse(tmp_path, program, ranks=True)
    assert (found["verdict"], found["steps"], len(found["ranks"])) == ("fits", 3, 2), lines[-20:]
    assert [rank["values"] for rank in found["ranks"]] == [[], []]
    waits = "as in a pipeline's bubbles, is not in it" in "".join(found["report"])
    assert waits == (program == "pipeline.py")


def test_ranks_send_each_other_equal_shares_of_tokens(tmp_path: Path) -> None:
    found, lines = rehearse(tmp_path, "expert_parallel.py", ranks=True)
    assert (found["verdict"], found["steps"]) == ("fits", 3), lines[-20:]
    # Half of the tokens of two ranks, twice chosen, for four experts.
    assert {line for line in lines if line.startswith("tokens")} == {"tokens 512 512 512 512"}


def test_arguments_of_random_numbers_are_valid(tmp_path: Path) -> None:
    found, lines = rehearse(tmp_path, "draws.py")
    # Repeats that nobody knows are one of each.
    assert "shapes [(4, 8), (6, 8), (4, 8)]" in lines, lines[-10:]
    code = {read["code"] for read in found["ranks"][0]["values"]}
    assert "action = Normal(x, x.exp()).rsample()" in code
    assert not any(line.startswith("known") for line in code)


def test_a_generation_ends_at_its_length(tmp_path: Path) -> None:
    _, lines = rehearse(tmp_path, "generates.py")
    got = [line.split()[1:] for line in lines if line.startswith("generated ")]
    prompt, new = 16, 64
    # Keys and values of two layers in fp32; the last token has none.
    cache = 2 * 2 * 4 * 256 * (prompt + new - 1)
    one, beams = ([str(prompt + new), str(new), str(rows * cache)] for rows in (2, 3 * 2))
    assert got == [
        ["greedy", *one],
        ["sampled", *one],
        ["beams", *beams],
        ["synced", *one],
        ["before_5", *one],
    ], lines[-10:]


def test_compiled_code_has_its_constants_and_stays_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "of_real_runs"))
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    found, lines = rehearse(tmp_path, "compiles.py")
    assert "constants 0.0 7.5" in lines, lines[-10:]
    assert found["ranks"][0]["values"] == []
    assert not (tmp_path / "of_real_runs").exists()


PADDED = """\
import torch
from transformers import AutoModel, {config}

sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
model = AutoModel.from_config({config}(vocab_size=64, **sizes)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    mask = torch.ones(8, 512, dtype=torch.long)
    mask[:, {length}:] = 0
    batch = dict(input_ids=torch.full((8, 512), 5).cuda(), attention_mask=mask.cuda())
    with torch.autocast("cuda", torch.bfloat16):
        model(**batch).last_hidden_state.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("config", ["BertConfig", "LlamaConfig"])
def test_a_padded_batch_has_a_mask_of_attention(config: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    peaks = []
    for length in (512, 300):
        program = tmp_path / f"{length}.py"
        program.write_text(PADDED.format(config=config, length=length))
        found, _ = rehearse(tmp_path / str(length), str(program))
        places = [read["library"] or "" for read in found["ranks"][0]["values"]]
        assert not any("masking_utils" in place for place in places)
        peaks.append(found["ranks"][0]["allocated_peak_bytes"])
    layers, batch, tokens = 2, 8, 512
    assert peaks[1] - peaks[0] >= layers * batch * tokens**2 * 2  # kept in bf16 by each layer
