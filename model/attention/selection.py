"""The attention kernels, and which one runs: decided from the setting alone, before any start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from launcher.model.attention import flash
from launcher.model.attention.dense import BACKENDS, EAGER, SDPA, sdpa, sdpa_backend
from launcher.model.attention.flex import FLEX
from launcher.model.attention.kernel import AttentionKernel, AttentionSetting
from launcher.model.config import AttentionKind, ModelConfig, SdpaBackend
from launcher.util.errors import NotInstalled, UserError

KERNELS: dict[AttentionKind, AttentionKernel] = {
    "eager": EAGER,
    "sdpa": SDPA,
    "flash": flash.FLASH,
    "flex": FLEX,
}
"""By the name that a user gives. A new kernel: its file, its line here, and its name in
`model.config.AttentionKind`."""
_ANY_LENGTH = 2  # on a CPU the backend does not depend on the sequence length


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """The kernel that runs and why, for the log. `str` gives `sdpa (flash)`, `eager`."""

    kind: AttentionKind
    backend: str | None
    """sdpa's backend or flash's implementation. None where there is
    only one, or where the GPU has to be asked (`on`)."""
    reason: str
    setting: AttentionSetting
    sdpa_backend: SdpaBackend

    def __str__(self) -> str:
        return self.kind if self.backend is None else f"{self.kind} ({self.backend})"

    def on(self, device: torch.device, *, seq_len: int) -> AttentionChoice:
        """Return it with the backend that PyTorch takes on `device` for sequences this long.

        Allocates a few kilobytes there. Raises UserError when the wanted one cannot run.
        """
        if self.kind != "sdpa":
            return self
        backend = sdpa_backend(self.setting, self.sdpa_backend, device=device, seq_len=seq_len)
        return replace(self, backend=backend)


def choose(
    kind: AttentionKind,
    setting: AttentionSetting,
    *,
    sdpa_backend: SdpaBackend = "auto",
    elsewhere: bool = False,
) -> AttentionChoice:
    """Choose the attention of a kind, or for `auto` the fastest that is installed and able.

    A run `elsewhere` finds there what it needs: not what is installed here counts. Allocates
    nothing on a GPU.

    Raises:
        UserError: the kind or the sdpa backend that is asked for cannot run in this setting;
            NotInstalled: it could, were its package installed.
    """
    reason = "asked for"
    if sdpa_backend != "auto":
        if kind not in ("auto", "sdpa"):
            raise UserError(
                f"sdpa_backend {sdpa_backend} belongs to attention sdpa, not {kind}; leave it out."
            )
        kind, reason = "sdpa", f"sdpa_backend {sdpa_backend} asked for"
    if kind == "auto":
        kind, reason = _fastest(setting, elsewhere)
    obstacle = KERNELS[kind].obstacle(setting)
    if obstacle is not None:
        raise UserError(obstacle)
    missing = None if elsewhere else KERNELS[kind].missing(setting)
    if missing is not None:
        raise NotInstalled(missing)
    backend = None
    if kind == "flash":
        backend = flash.implementation(setting.capability, setting.dropout, setting.window)
    choice = AttentionChoice(
        kind=kind, backend=backend, reason=reason, setting=setting, sdpa_backend=sdpa_backend
    )
    if setting.device_type == "cpu":
        choice = choice.on(torch.device("cpu"), seq_len=_ANY_LENGTH)
    return choice


def kernel_for(config: ModelConfig) -> AttentionKernel:
    """The kernel of a model; sdpa, which runs everywhere, for an `auto` without `choose`.

    Raises nothing: whether it can run is `choose`'s question.
    """
    if config.attention not in ("auto", "sdpa") or config.sdpa_backend == "auto":
        return KERNELS["sdpa" if config.attention == "auto" else config.attention]
    return replace(SDPA, function=partial(sdpa, backend=BACKENDS[config.sdpa_backend]))


def fuses_scores(config: ModelConfig) -> bool:
    """Return whether attention holds no T x T scores; sdpa's own composition of operators does."""
    return kernel_for(config).fused and config.sdpa_backend != "math"


def _fastest(setting: AttentionSetting, elsewhere: bool) -> tuple[AttentionKind, str]:
    """FA3 and FA4 are the fastest on the GPUs that have them; then what takes a window as a number.

    Without a window, torch's own choice (cuDNN on Hopper, FA2 before) is as fast as FA2 is.
    """
    masks = [] if setting.window is None else ["the window"]
    masks += ["documents"] if setting.documents else []
    what = " and ".join(masks)
    if setting.device_type != "cuda":
        why = "the fused attention of this device"
        return "sdpa", why + (f", with {what} as a mask" if masks else "")
    # torch's CUDA builds come with FA2 and triton, which the one that plans may lack.
    able = {
        kind
        for kind, kernel in KERNELS.items()
        if kernel.obstacle(setting) is None and (elsewhere or kernel.missing(setting) is None)
    }
    if setting.documents:  # not timed on a GPU yet
        able.discard("flash")
    newest = flash.implementation(setting.capability, setting.dropout, setting.window)
    if "flash" in able and newest in ("FA3", "FA4"):
        return "flash", f"{newest} is installed for this GPU"
    if not masks:
        return "sdpa", "the fused attention that PyTorch takes on this GPU"
    if "flash" in able:
        return "flash", "takes the window as a number, without a T x T mask"
    if "flex" in able:
        return "flex", f"{what} as blocks, without a T x T mask"
    return "sdpa", f"{what} as a mask; flex cannot run here"
