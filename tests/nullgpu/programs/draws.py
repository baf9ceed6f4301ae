"""One training step, then draws of random numbers, whose arguments torch checks on the device."""

import torch
from torch.distributions import Categorical, Normal

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(4, 8, device="cuda")
model(batch).square().mean().backward()
optimizer.step()

x = model(batch)
action = Normal(x, x.exp()).rsample()
chosen = Categorical(logits=x)
loss = -Normal(x, 1.0).log_prob(action).mean() - chosen.log_prob(chosen.sample()).mean()
drawn = torch.normal(x.detach(), x.detach().exp())
repeats = torch.tensor([3, 0, 2, 1]).cuda()
known = torch.repeat_interleave(x, repeats, 0)
unknown = x.repeat_interleave(repeats + 1, 0)
loss.backward()
print("shapes", [tuple(tensor.shape) for tensor in (drawn, known, unknown)], flush=True)
