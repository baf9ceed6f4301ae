"""Which attention runs where, and the message when the one asked for cannot."""

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.model.attention import (
    AttentionChoice,
    AttentionSetting,
    choose,
    flash,
    flex,
    kernel_for,
)
from launcher.model.config import AttentionKind, ModelConfig, SdpaBackend
from launcher.util.errors import NotInstalled, UserError

HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)


def chosen(
    kind: AttentionKind,
    *,
    sdpa_backend: SdpaBackend = "auto",
    elsewhere: bool = False,
    **changes: Any,
) -> AttentionChoice:
    setting = AttentionSetting(**{"head_size": 64, "window": None, "dropout": 0.0} | changes)
    return choose(kind, setting, sdpa_backend=sdpa_backend, elsewhere=elsewhere)


def on_cpu(kind: AttentionKind, **changes: Any) -> AttentionChoice:
    cpu: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float32}
    return chosen(kind, **cpu | changes)


def on_gpu(kind: AttentionKind, **changes: Any) -> AttentionChoice:
    gpu: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16, "capability": AMPERE}
    return chosen(kind, **gpu | changes)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Return what a GPU machine has installed, for the rules alone: no kernel runs here."""
    has = {"triton": True, "flash_attn_interface": False, "torch": True}
    versions: dict[str, str] = {}
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (name if has[name] else None) if name in has else find(name),
    )
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: has["torch"])
    monkeypatch.setattr(flash, "fa4_fits_torch", lambda: has.get("flash-attn-4", False))
    monkeypatch.setattr(
        flash, "version_of", lambda name: "2.8.3" if has.get(name) else versions.get(name)
    )
    return has


def resolved(**changes: Any) -> Resolved:
    return resolve(RunConfig().replace(**changes), world_size=1, device_type="cpu")


def test_on_a_cpu_auto_is_sdpa_with_the_backend_that_torch_takes() -> None:
    assert str(on_cpu("auto")) == "sdpa (flash)"
    assert str(on_cpu("auto", window=1, dtype=torch.bfloat16)) == "sdpa (flash)"
    assert str(on_cpu("auto", dropout=0.1)) == "sdpa (math)"
    assert "mask" in on_cpu("auto", window=8).reason
    assert on_cpu("sdpa").reason == "asked for"
    assert str(on_cpu("eager")) == "eager"


def test_the_named_backend_is_the_one_that_runs() -> None:
    assert str(on_cpu("auto", sdpa_backend="math")) == "sdpa (math)"
    with torch.profiler.profile() as profile:
        kernel = kernel_for(
            ModelConfig(
                vocab_size=8,
                context=8,
                layers=1,
                heads=1,
                d_model=8,
                attention="sdpa",
                sdpa_backend="math",
            )
        )
        qkv = [torch.randn(1, 1, 4, 8) for _ in range(3)]
        kernel.function(*qkv, mask=None, window=None, dropout=0.0)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_attention_math" in names


@pytest.mark.parametrize(
    ("backend", "dropout", "able"),
    [("cudnn", 0.0, "flash or math or auto"), ("efficient", 0.0, "flash"), ("flash", 0.1, "math")],
)
def test_a_backend_that_cannot_run_is_refused_with_those_that_can(
    backend: SdpaBackend, dropout: float, able: str
) -> None:
    with pytest.raises(UserError, match=rf"sdpa_backend {backend} cannot run on cpu.*use {able}"):
        on_cpu("sdpa", sdpa_backend=backend, dropout=dropout)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("flash", {"device_type": "cpu"}, "attention flash needs a GPU, and this is cpu; use"),
        ("flash", {"dtype": torch.float32}, "computes in bf16 or fp16, not in torch.float32"),
        ("flash", {"head_size": 20}, "multiples of 8 up to 256, not 20"),
        ("flash", {"head_size": 320}, "multiples of 8 up to 256, not 320"),
        ("flash", {"capability": TURING}, "needs compute capability 8.0, this GPU has 7.5"),
        ("flex", {"device_type": "cpu"}, "attention flex has no backward on cpu"),
        ("flex", {"dropout": 0.1}, "cannot drop attention weights .dropout 0.1."),
        ("flex", {"head_size": 8}, "head sizes from 16, not 8"),
        ("flex", {"capability": (6, 1)}, "needs compute capability 7.0, this GPU has 6.1"),
        ("flash", {"sdpa_backend": "math"}, "sdpa_backend math belongs to attention sdpa, not"),
    ],
)
def test_a_kind_that_cannot_run_is_refused_with_the_reason(
    kind: AttentionKind, changes: dict[str, Any], sentence: str, installed: dict[str, bool]
) -> None:
    with pytest.raises(UserError, match=sentence):
        on_gpu(kind, **changes)


def test_what_is_not_installed_is_named_with_its_install_line(installed: dict[str, bool]) -> None:
    installed["torch"] = installed["triton"] = False
    with pytest.raises(NotInstalled, match="pip install flash-attn --no-build-isolation"):
        on_gpu("flash")
    with pytest.raises(NotInstalled, match="pip install triton"):
        on_gpu("flex")


def test_on_a_gpu_auto_takes_the_fastest_that_is_able(installed: dict[str, bool]) -> None:
    assert on_gpu("auto").kind == "sdpa"
    assert str(on_gpu("auto", window=64)) == "flash (torch's FA2)"
    assert on_gpu("auto", window=64, dtype=torch.float32).kind == "flex"
    assert on_gpu("auto", window=64, dtype=torch.float32, dropout=0.1).kind == "sdpa"
    assert on_gpu("auto", window=64, capability=TURING).kind == "flex"
    installed["flash-attn"] = True
    assert str(on_gpu("auto", window=64, dropout=0.1)) == "flash (flash-attn 2.8.3)"
    installed["flash-attn-4"] = True
    assert on_gpu("auto").kind == "sdpa"  # not on this GPU
    assert str(on_gpu("auto", capability=HOPPER)) == "flash (FA4)"
    assert str(on_gpu("auto", capability=(10, 0))) == "flash (FA4)"
    assert str(on_gpu("flash", capability=HOPPER, window=64)) == "flash (flash-attn 2.8.3)"
    installed["flash_attn_interface"] = True
    assert str(on_gpu("auto", capability=HOPPER)) == "flash (FA3)"
    assert on_gpu("auto", capability=HOPPER, dropout=0.1).kind == "sdpa"


def test_without_a_visible_gpu_nothing_is_held_against_it(installed: dict[str, bool]) -> None:
    assert str(on_gpu("flash", capability=None)) == "flash (torch's FA2)"
    assert str(on_gpu("sdpa", capability=None)) == "sdpa"  # the GPU will be asked


def test_a_plan_is_for_what_a_machine_with_gpus_has(
    installed: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's CPU build here, and with an old GPU."""
    installed["torch"] = installed["triton"] = False
    assert on_gpu("auto", window=64).kind == "sdpa"
    assert on_gpu("auto", window=64, capability=None, elsewhere=True).kind == "flash"
    assert on_gpu("auto", documents=True, capability=None, elsewhere=True).kind == "flex"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: TURING)
    config = RunConfig().replace(window=8, precision="bf16")
    planned = resolve(config, world_size=1, device_type="cuda", elsewhere=True)
    assert planned.attention.kind == "flash"


def test_a_run_gets_the_kind_that_runs_and_keeps_what_was_asked_for() -> None:
    run = resolved(attention="auto", window=8)
    assert run.model.attention == "sdpa"
    assert run.config.model.attention == "auto"
    assert str(run.attention.on(torch.device("cpu"), seq_len=run.seq_len)) == "sdpa (flash)"
    with pytest.raises(UserError, match="attention flash needs a GPU"):
        resolved(attention="flash")


def test_flex_and_outputs_that_are_kept_go_together_only_compiled(
    installed: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"activation_checkpointing": "selective", "window": 8, "precision": "fp32"}

    def on_gpus(**more: Any) -> Resolved:
        config = RunConfig().replace(**flags, **more)
        return resolve(config, world_size=1, device_type="cuda")

    with pytest.raises(UserError, match=r"flex .* selective needs --compile"):
        on_gpus(attention="flex")
    assert on_gpus(attention="auto").attention.kind == "sdpa"
    assert on_gpus(attention="flex", compile=True).attention.kind == "flex"


def test_an_unresolved_model_runs_anywhere() -> None:
    config = ModelConfig(vocab_size=8, context=8, layers=1, heads=1, d_model=8)
    assert kernel_for(config) == kernel_for(replace(config, attention="sdpa"))


@pytest.mark.parametrize(
    ("returns", "fits"),
    [
        ("Tuple[torch.Tensor, torch.Tensor]", True),
        ("Tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]", False),
        ("tuple", False),
    ],
)
def test_flash_attn_4_is_taken_only_where_torch_unpacks_what_it_returns(
    returns: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "flash_attn" / "cute" / "interface.py"
    source.parent.mkdir(parents=True)
    source.write_text(f"def _flash_attn_fwd(q, k, v) -> {returns}:\n    ...\n")
    monkeypatch.setattr(flash, "files_of", lambda package: [source])
    flash.fa4_fits_torch.cache_clear()
    assert flash.fa4_fits_torch() == fits
    flash.fa4_fits_torch.cache_clear()


def test_a_flash_attn_4_that_cannot_be_used_is_named(
    installed: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["torch"], installed["flash-attn-4"] = False, True
    monkeypatch.setattr(flash, "fa4_fits_torch", lambda: False)
    with pytest.raises(
        NotInstalled, match=r"flash-attn-4 2.8.3 cannot be used here.*use attention"
    ):
        on_gpu("flash", capability=HOPPER)


def test_flex_never_goes_on_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """dynamo compiles a function so many times, then calls it as it is."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flex, "MOST_KERNELS", 2)
    flex._compiled.cache_clear()

    def attend(dtype: torch.dtype) -> None:
        q = torch.zeros(1, 1, 16, 16, dtype=dtype)
        mask = flex.block_mask(16, None, q.device)
        flex.flex(q, q, q, mask=mask, window=None, dropout=0.0)

    attend(torch.float32)
    attend(torch.bfloat16)
    with pytest.raises(FailOnRecompileLimitHit):
        attend(torch.float16)
    flex._compiled.cache_clear()
