"""A plain loop that ends in as many ways as its first argument says."""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

started, _, how = sys.argv[1].rpartition(": ")
ways = how.split(" and ")


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if how == "broken":
        session = sys.modules.get("shardscale_observer.session")
        if session is not None:
            session.Session.enter = None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if how == "inside backward":
        for parameter in model.parameters():
            own = torch.optim.SGD([parameter], lr=1e-3)

            def update(_: torch.Tensor, own: torch.optim.SGD = own) -> None:
                own.step()

            parameter.register_post_accumulate_grad_hook(update)
        optimizer.step = lambda: None  # type: ignore[method-assign, assignment, misc]
    if how == "small first":
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    context = next((way for way in ways if way in ("fork", "spawn")), None)
    loader = torch.utils.data.DataLoader(
        Numbers(),
        batch_size=8,
        num_workers=int(context is not None),
        multiprocessing_context=context,
    )
    for step, batch in enumerate(loader):

        def gradients(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch).square().mean()
            if "penalty" in ways:  # what it differentiates is no loss
                torch.autograd.grad(model(batch).sum(), list(model.parameters()))
            loss.backward()
            return loss

        if "closure" in ways:
            loss = optimizer.step(gradients)
            assert loss is not None
        else:
            loss = gradients()
            optimizer.step()
        print("loss", step, repr(loss.item()), flush=True)
    if how == "os._exit":
        os._exit(9)
    if how.startswith("own hook"):  # as rich and typer have one
        sys.excepthook = lambda kind, error, trace: print(error, file=sys.stderr)
    if how.endswith("error"):
        raise ValueError("of the program")
    if how.endswith("memory"):
        torch.empty(2**60)
    if how in ("SIGTERM", "SIGINT"):
        print("path", [p for p in sys.path if "watch/inside" in p], flush=True)
        print("ready", flush=True)
        time.sleep(60)
    if how == "handles":
        signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(11))
        print("ready", flush=True)
        time.sleep(60)


def rank(number: int) -> None:
    main()


if __name__ == "__main__":
    if started == "mp.spawn":
        spawn(rank)
    elif started == "Process":
        process = torch.multiprocessing.Process(target=main)
        process.start()
        process.join()
        sys.exit(process.exitcode)
    else:
        main()
