"""One training step, then reads of values by every rule; prints what each line got."""

import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = model(torch.randn(4, 8, device="cuda")).square()
x.mean().backward()
optimizer.step()


def has_overflow(tensor: torch.Tensor) -> object:
    return tensor.item()


def check_trigger(flag: torch.Tensor) -> object:
    return flag.item() >= 1


def fast_all(mask: torch.Tensor) -> torch.Tensor:
    """As transformers asks whether a mask hides nothing."""
    return mask.sum() == mask.numel()


def should_stop(current: torch.Tensor) -> bool:
    """As Lightning's EarlyStopping asks: the function speaks of a stop, the line does not."""
    return not torch.isfinite(current)


def is_bad(loss: torch.Tensor) -> bool:
    """Ask both ways in one line, and once over several."""
    if loss.isnan() or not torch.isfinite(loss):
        return True
    return bool(
        loss.isnan()  # a line of its own
        or not torch.isfinite(loss)
    )


def is_checked(condition: torch.Tensor) -> bool:
    """As transformers checks that there is a token for each feature of an image."""
    torch._check_tensor_all_with(ValueError, condition, lambda: "does not hold")
    return True


found_inf = (x.sum() > 3).float()
train_info: dict[str, float] = {}
counts = (x > 0).sum()
got = {
    "inf": found_inf.item(),
    "info": train_info.setdefault("loss", x.sum().item()),
    "function": has_overflow(counts),
    "stop": bool((counts + 1 > 0) * 1 == 1),  # early_stop
    "trigger": check_trigger(counts),
    "finite": bool(torch.isfinite(x.sum())),
    "not finite": bool(~torch.isfinite(x.sum())),
    "a line before its function": should_stop(x.sum()),
    "a call before its line": is_bad(x.sum()),
    "holds": (x > 0).all().item(),
    "holds, by a sum": bool(fast_all(x > 0)),
    "checked": is_checked(x > 3),
    "boolean": bool(x.sum() > 3),
    "integer": counts.item(),
    "number": x.sum().item(),
    "small": x.sum(1).tolist(),
    "large": float((x + torch.ones(80, 4, 8, device="cuda")).cpu().abs().max()),
    "mask": int((x > torch.ones(80, 4, 8, device="cuda")).cpu().sum()),
    "mask of nan": int(torch.isnan(x + torch.ones(80, 4, 8, device="cuda")).cpu().sum()),
    "known mask": int(torch.zeros(80, dtype=torch.bool).cuda().cpu().sum()),
    "nonzero": x[x > 3].numel(),
    "printed": len(repr(torch.ones(1000, device="cuda") * 2)) > 0,
}
print("got", got)
