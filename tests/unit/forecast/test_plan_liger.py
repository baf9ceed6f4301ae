"""Liger's norms in the trace of another trainer's run."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.glm4.modeling_glm4 import Glm4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from launcher.forecast.trace.liger import liger_kernels


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [
        (LlamaRMSNorm, True),
        (GemmaRMSNorm, True),
        (Gemma2RMSNorm, False),
        (Olmo2RMSNorm, False),
        (Glm4RMSNorm, False),
    ],
)
def test_a_residual_behind_a_norm_keeps_its_gradient(kind: type[nn.Module], in_place: bool) -> None:
    norm = kind(4)
    x, gradient = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    with liger_kernels(norm):
        (found,) = torch.autograd.grad(norm(x), x, gradient)
    assert found.shape == x.shape
    assert (found.data_ptr() == gradient.data_ptr()) is in_place
