"""Detectors on the null GPU train on as many boxes as they sample."""

import os
import subprocess
import sys
from pathlib import Path

from nullgpu.runs import ROOT

MODULES = {
    "_utils": """
import torch

class BalancedPositiveNegativeSampler:
    def __init__(self, batch_size_per_image, positive_fraction):
        self.batch_size_per_image = batch_size_per_image
        self.positive_fraction = positive_fraction

    def __call__(self, matched):
        positive, negative = [], []
        for one in matched:
            for masks, found, most in (
                (positive, torch.where(one >= 1)[0], self.batch_size_per_image // 4),
                (negative, torch.where(one == 0)[0], self.batch_size_per_image * 3 // 4),
            ):
                mask = torch.zeros_like(one, dtype=torch.uint8)
                mask[found[torch.randperm(found.numel(), device="cuda")[:most]]] = 1
                masks.append(mask)
        return positive, negative
""",
    "rpn": """
import torch

class RegionProposalNetwork(torch.nn.Module):
    def compute_loss(self, labels):
        positive, negative = self.fg_bg_sampler(labels)
        print("anchors", *(len(torch.where(torch.cat(one))[0]) for one in (positive, negative)))
""",
    "roi_heads": """
import torch

class RoIHeads(torch.nn.Module):
    def select_training_samples(self, labels):
        masks = zip(*self.fg_bg_sampler(labels))
        sampled = [torch.where(one | other)[0] for one, other in masks]
        return None, None, [one[at] for one, at in zip(labels, sampled)], None

    def forward(self, labels):
        labels = self.select_training_samples(labels)[2]
        print("boxes", [len(one) for one in labels], len(torch.where(labels[0] > 0)[0]))
        levels = torch.randint(4, (1024,), device="cuda")
        for level, _ in enumerate("abcd"):
            rows = torch.where(levels == level)[0]
        print("of a level", len(rows))
""",
}
PROGRAM = """
import torch
from torchvision.models.detection import _utils, roi_heads, rpn

matched = torch.randint(-1, 2, (2, 4096), device="cuda")
sampler = _utils.BalancedPositiveNegativeSampler
proposals, heads = rpn.RegionProposalNetwork(), roi_heads.RoIHeads()
proposals.fg_bg_sampler, heads.fg_bg_sampler = sampler(256, 0.25), sampler(512, 0.25)
proposals.compute_loss([*matched])
heads([*matched])
"""


def test_as_many_boxes_as_are_sampled(tmp_path: Path) -> None:
    folder = tmp_path / "torchvision" / "models" / "detection"
    folder.mkdir(parents=True)
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    (tmp_path / "boxes.py").write_text(PROGRAM)
    words = ("rehearse", "--gpu", "T4", "--out", str(tmp_path / "run"), "--")
    done = subprocess.run(
        (sys.executable, "-m", "launcher", *words, sys.executable, str(tmp_path / "boxes.py")),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "anchors 128 384" in done.stderr
    assert "boxes [512, 512] 128" in done.stderr
    assert "of a level 256" in done.stderr
