"""Offload between a GPU and its host: activations, and states on a disk."""

from pathlib import Path

import pytest
import torch

from launcher.model.config import ActivationCheckpointing, ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.zero import nvme_build

pytestmark = pytest.mark.gpu

LAYERS = 8


def model(checkpointing: ActivationCheckpointing) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=512,
        context=512,
        layers=LAYERS,
        heads=4,
        d_model=256,
        activation_checkpointing=checkpointing,
    )
    return GPT(config).cuda()


def tokens() -> torch.Tensor:
    return torch.randint(0, 512, (16, 512), generator=torch.Generator().manual_seed(1)).cuda()


def test_offloaded_activations_give_the_same_gradients() -> None:
    batch = tokens()
    gradients = {}
    for checkpointing in ("full", "offload"):
        module = model(checkpointing)
        for _ in range(3):  # host buffers are used again from the second step on
            module.zero_grad()
            module(batch, batch).backward()
        gradients[checkpointing] = [
            p.grad.clone() for p in module.parameters() if p.grad is not None
        ]
    torch.testing.assert_close(gradients["offload"], gradients["full"], rtol=0, atol=1e-6)


def test_offloaded_activations_leave_the_gpu() -> None:
    batch = tokens()
    left = {}
    for checkpointing in ("full", "offload"):
        module = model(checkpointing)
        before = torch.cuda.memory_allocated()
        loss = module(batch, batch)
        torch.cuda.synchronize()
        left[checkpointing] = torch.cuda.memory_allocated() - before
        loss.backward()
    block_input = 16 * 512 * 256 * 4
    assert left["full"] - left["offload"] >= 0.9 * LAYERS * block_input


@pytest.mark.nvme
@pytest.mark.skipif(not nvme_build.is_built(), reason="DeepSpeed's async_io is not built")
def test_states_on_a_disk_train_as_in_memory(tmp_path: Path) -> None:
    from gpu.test_gpu import losses, train

    text = tmp_path / "text.txt"
    text.write_text(Path(nvme_build.__file__).read_text() * 20)
    flags = ["--zero", "3", "--precision", "bf16", "--d-ff", "8192"]
    disk = ["--offload-optimizer", "nvme", "--offload-param", "nvme"]
    disk += ["--nvme-path", str(tmp_path / "swap")]
    expected = losses(train(text, tmp_path / "memory", *flags))
    assert losses(train(text, tmp_path / "disk", *flags, *disk)) == pytest.approx(
        expected, rel=2e-2
    )
    assert list((tmp_path / "swap").iterdir()) == []
