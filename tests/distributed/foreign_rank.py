"""One rank of a process group that trains decoders of transformers, one case after the other.

    torchrun --nproc 2 foreign_rank.py FOLDER CASE...

Beside each case goes what it is held against: transformers and torch's AdamW, or the optimizer that
the case has, in a plain loop of one process, from the same weights and over the same micro-batches.
"""

import copy
import importlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from foreign_cases import (
    ADAPTED,
    BASE,
    BOTH,
    CASES,
    GIVEN,
    MEASURED,
    MESHED,
    RESUMED,
    STEPS,
    TARGETS,
    USERS,
    Case,
)
from rank_loop import Work, rank_of_group, release, report, steps
from tiny_architectures import ARCHITECTURES, MORE, WIDE

from examples.decoder import Config, build
from launcher.checkpoint import Checkpointer
from launcher.checkpoint.checkpointer import ReadableWeights
from launcher.checkpoint.pretrained.stored import open_stored
from launcher.checkpoint.pretrained.transformed import Quantized
from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.data import Corpus, GlobalBatches, open_corpus
from launcher.forecast.predict import predict
from launcher.measure.memory import TracedMemory
from launcher.model.build import initial_value
from launcher.model.foreign.adapters import linears
from launcher.model.foreign.config import ForeignConfig
from launcher.model.linears import dequantize, quantize
from launcher.optim.entry import parameter_groups
from launcher.optim.registry import build_optimizer
from launcher.parallel.world import World
from launcher.run.provenance import base_of
from launcher.run.saves import run_entries
from launcher.strategies.engine import Engine, train_step
from launcher.strategies.flat_shards import PARAM
from launcher.strategies.parameters import parameter_shapes, trained_shapes
from launcher.tools.exchange.choice import ExportOptions
from launcher.tools.exchange.export import export
from launcher.train import build_engine, to_device
from launcher.util.flags import as_flags

for _large in ("transformers.modeling_utils", "peft", "torch._inductor.compile_fx"):
    importlib.import_module(_large)  # once, before the ranks fork

FIELDS: Mapping[str, Mapping[str, Any]] = {
    **ARCHITECTURES,
    **WIDE,
    **{name: MORE[name] for name in ("olmo3", "qwen2_moe", "ernie4_5")},
    USERS: {"vocab_size": 260, "context": 64, "layers": 2, "d_model": 64},
}


_OPTIMIZER = ("optimizer", "lr")  # of either
_KEPT = ("lora", "quantize", "document", "global_batch", *_OPTIMIZER)
"""Begins of the names of changes that one process makes, too."""
HALF = STEPS // 2
_STEADY = ("second", "third")


def main() -> None:
    folder, *names = sys.argv[1:]
    os.chdir(folder)
    cases = [case for case in (*CASES, *MESHED) if case.name in names]
    with rank_of_group(timeout_s=60) as world:
        alone = replace(world, rank=0, local_rank=0, size=1, local_size=1)
        plain = {(case.architecture, case.accumulation): case for case in cases}
        mine = [*plain.values()][world.rank :: world.size]
        work = [
            (
                {"plain": case.architecture, "accumulation": case.accumulation},
                partial(plainly, case),
            )
            for case in mine
        ]
        work += [
            ({"single": case.architecture}, partial(train, replaced(case), alone)) for case in mine
        ]
        report(".", world, work, every_rank=True)
        report(".", world, [({"name": c.name}, partial(train, c, world)) for c in cases])
        counted = [case for case in MEASURED if case.name in names]
        report(".", world, [({"counted": c.name}, partial(count, c, world)) for c in counted])
        saved = [case for case in cases if case in RESUMED]
        report(".", world, [({"resumed": c.name}, partial(resume, c, world)) for c in saved])
        mine = saved[world.rank :: world.size]
        report(
            ".",
            world,
            [({"saved": c.name}, partial(export_saved, c)) for c in mine],
            every_rank=True,
        )
        mine = [case for case in (*GIVEN, *ADAPTED) if case.name in names]
        if world.is_main:
            for case in mine:
                write_folder(case)
        dist.barrier()
        report(
            ".",
            world,
            [({"given": c.name}, partial(train_given, c, world, "transformers")) for c in mine],
        )
        exports = [({"exported": c.name}, partial(export_given, c)) for c in mine]
        report(".", world, exports if world.is_main else ())
        report(".", world, of_given(mine[world.rank :: world.size], alone), every_rank=True)


def of_given(cases: list[Case], alone: World) -> Work:
    """One process from the same folders: a plain loop, and each decoder that computes them."""
    for case in cases:
        one = replaced(case)
        yield {"plain_given": case.name}, partial(plainly, case, Path(case.architecture))
        for decoder in ("transformers", *(("own",) if case.architecture in BOTH else ())):
            key = {"single_given": case.name, "decoder": decoder}
            yield key, partial(train_given, one, alone, decoder)


def write_folder(case: Case) -> None:
    """Weights as transformers saves them: experts one by one, in several files."""
    from transformers import AutoModelForCausalLM

    if Path(case.architecture).exists():
        return
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(config_of(case.architecture))
    model.to(torch.bfloat16).save_pretrained(case.architecture, max_shard_size="20KB")
    assert len(list(Path(case.architecture).glob("model-*.safetensors"))) > 1


def train_given(case: Case, world: World, decoder: str) -> dict[str, Any]:
    """Losses of our loop, from the weights of a folder."""
    changes = {**BASE, **case.changes, "decoder": decoder, "init_from": case.architecture}
    config = parse_run_config(as_flags(changes).split())
    resolved = resolve(config, world_size=world.size, device_type="cpu")
    assert isinstance(resolved.model, ForeignConfig) == (decoder == "transformers")
    corpus = open_corpus(config.data, vocab_size=260, seq_len=resolved.seq_len)
    engine = build_engine(resolved, world)
    with open_stored(Path(case.architecture), config.model.decoder) as stored:
        plain = config.model.quantize_base == "none"
        weights = stored if plain else Quantized(stored, resolved.model)
        if world.size > 1:
            Checkpointer(Path("unused")).begin_with(weights, engine)
        else:  # which all ranks of the group would have to do together
            fill(engine, weights)
    losses, _ = steps(resolved, corpus, world, engine, range(1, STEPS + 1))
    if world.size > 1:
        saves = Checkpointer(run_folder(case) / "checkpoints", asynchronous=False)
        base = base_of(resolved)
        beside = {} if base is None else {"base": base}
        saves.save(STEPS, engine, {**run_entries(resolved, corpus), **beside})
    release(engine)
    return {"losses": losses}


def fill(engine: Engine, weights: ReadableWeights) -> None:
    """Give an engine of one process its weights."""
    state = engine.training_state()
    for shard in (*state.frozen(), *state.loaded()):
        if shard.kind == PARAM and weights.has(shard.name):
            weights.read_into(shard)
    state.finish_load(state.counters())


def run_folder(case: Case) -> Path:
    """Return the folder where the run of weights that were given keeps its checkpoints."""
    return Path(f"run-{GIVEN.index(case) if case in GIVEN else -1 - ADAPTED.index(case)}")


def export_given(case: Case) -> dict[str, Any]:
    """Export a run that began with given weights, and compare what is loaded again."""
    run = run_folder(case)
    out = Path(f"export-{run.name}")
    return export_adapter(run, out, case) if "lora_rank" in case.changes else exported(run, out)


def export_saved(case: Case) -> dict[str, Any]:
    """Export a sharded run for transformers; empty where a user's code computes the model."""
    run = saved_folder(case)
    return {} if case.architecture == USERS else exported(run, Path(f"export-{run.name}"))


def exported(run: Path, out: Path) -> dict[str, Any]:
    """Names of the parameters that transformers loads otherwise than the checkpoint has them."""
    from transformers import AutoModelForCausalLM

    export(ExportOptions(run=run, out=out, shard_size="30KB", tokenizer="none"))
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    with open_stored(run) as stored:
        ours = {name: stored.read(f"causal.{name}") for name, _ in model.named_parameters()}
    differing = [n for n, p in model.named_parameters() if not torch.equal(p, ours[n].to(p.dtype))]
    return {"dtype": str(model.dtype), "differing": differing}


def export_adapter(run: Path, out: Path, case: Case) -> dict[str, Any]:
    """Largest difference of the logits of PEFT and of a merged export."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = Path(f"{out}-adapter")
    export(ExportOptions(run=run, out=adapter, adapter=True, dtype="fp32"))
    export(ExportOptions(run=run, out=out, merge=True, dtype="fp32", tokenizer="none"))
    base = AutoModelForCausalLM.from_pretrained(case.architecture, dtype=torch.float32)
    with open_stored(adapter) as back, open_stored(run) as stored:
        shapes = trained_shapes(back.config)
        assert shapes == trained_shapes(stored.config)
        differing = [n for n in shapes if not torch.equal(back.read(n), stored.read(n))]
    round_base(base, case)
    tokens = torch.arange(3, 20)[None]
    plain = base(input_ids=tokens).logits
    theirs = PeftModel.from_pretrained(base, str(adapter))(input_ids=tokens).logits
    ours = AutoModelForCausalLM.from_pretrained(out)(input_ids=tokens).logits
    return {
        "difference": (theirs - ours).abs().max().item(),
        "learnt": (theirs - plain).abs().max().item(),
        "differing": differing,
    }


def replaced(case: Case) -> Case:
    """The same batch in one process."""
    kept = {name: value for name, value in case.changes.items() if name.startswith(_KEPT)}
    return Case(architecture=case.architecture, changes={"strategy": "single", **kept})


def run_of(case: Case, world: World) -> tuple[Resolved, Corpus]:
    config = Path(f"{case.architecture}-{os.getpid()}.json")
    config.write_text(json.dumps(FIELDS[case.architecture]), encoding="utf-8")
    by = {"decoder": USERS} if case.architecture == USERS else {}
    changes: Mapping[str, Any] = {**BASE, **case.changes, **by, "model": str(config)}
    if case in ADAPTED:
        changes = {**changes, "random_base": True}
    # Refused on a CPU, where it is emulated.
    emulated = {"precision": "fp8"} if changes.get("precision") == "fp8" else {}
    asked = RunConfig().replace(**{**changes, **dict.fromkeys(emulated, "bf16")})
    resolved = resolve(asked, world_size=world.size, device_type="cpu")
    resolved = replace(resolved, config=resolved.config.replace(**emulated))
    return resolved, open_corpus(resolved.config.data, vocab_size=260, seq_len=resolved.seq_len)


def train(case: Case, world: World) -> dict[str, Any]:
    """Losses of our loop."""
    resolved, corpus = run_of(case, world)
    engine = build_engine(resolved, world)
    losses, _ = steps(resolved, corpus, world, engine, range(1, HALF + 1))
    if case in RESUMED:
        saves = Checkpointer(saved_folder(case) / "checkpoints", asynchronous=False)
        saves.save(HALF, engine, run_entries(resolved, corpus))
    losses += steps(resolved, corpus, world, engine, range(HALF + 1, STEPS + 1))[0]
    release(engine)
    return {"losses": losses}


def count(case: Case, world: World) -> dict[str, Any]:
    """The highest live bytes of a first step and of later ones, predicted and measured.

    gloo's thread holds what is reduced a little longer at times: what is more than predicted is
    measured again, and of later steps the lowest peak counts.
    """
    for _ in range(3):
        found = count_once(case, world)
        more = [bool(found) and found["measured"] > 1.01 * found["predicted"]]
        if world.size > 1:
            dist.broadcast_object_list(more, src=0)
        if not more[0]:
            break
    return found


def count_once(case: Case, world: World) -> dict[str, Any]:
    """Build an engine and take its steps; empty but on the main rank."""
    resolved, _ = run_of(case, world)
    memory = TracedMemory(world.device)
    with memory.trace:
        engine = build_engine(resolved, world)
        memory.watch(engine)
        for step, period in enumerate(("first_step", *_STEADY), start=1):
            memory.period(period)
            memory.begin_step(step)
            tokens = [torch.zeros(2, resolved.local_seq_len, dtype=torch.int64) for _ in range(2)]
            batch = [(tokens[0], tokens[1]) for _ in range(resolved.accumulation)]
            train_step(engine, batch, 1e-3, phase=memory.phase)
            memory.end_step(step)
    release(engine)
    if not world.is_main:
        return {}
    prediction = predict(resolved, rank=world.rank)
    trained = [size for (period, _), size in prediction.peaks.items() if period != "init"]
    found: dict[str, int] = defaultdict(int)
    for (period, _), size in memory.peaks.items():
        found[period] = max(found[period], size)
    later = min(found[period] for period in _STEADY)
    return {"measured": max(found["first_step"], later), "predicted": max(trained)}


def saved_folder(case: Case) -> Path:
    """Return the folder where the run of a case keeps its checkpoint."""
    return Path(f"saved-{RESUMED.index(case)}")


def resume(case: Case, world: World) -> dict[str, Any]:
    """Losses of the second half of the steps, under another strategy than the first."""
    resolved, corpus = run_of(case.elsewhere, world)
    engine = build_engine(resolved, world)
    checkpoints = saved_folder(case) / "checkpoints"
    assert Checkpointer(Path("unused")).load(checkpoints, engine) is not None
    losses, _ = steps(resolved, corpus, world, engine, range(HALF + 1, STEPS + 1))
    release(engine)
    return {"losses": losses}


def config_of(architecture: str) -> Any:
    """Its config, as transformers has it."""
    from transformers import CONFIG_MAPPING

    fields = copy.deepcopy(dict(FIELDS[architecture]))
    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


def plainly(case: Case, folder: Path | None = None) -> dict[str, Any]:
    """Losses of a plain loop, from the weights of a folder or those of the seed."""
    from transformers import AutoModelForCausalLM

    changes: dict[str, Any] = {"strategy": "ddp", "global_batch": 4 * case.accumulation}
    of_case = ("document", *_OPTIMIZER)
    changes |= {n: value for n, value in case.changes.items() if n.startswith(of_case)}
    two = replace(World(rank=0, local_rank=0, size=2, local_size=2, device=torch.device("cpu")))
    resolved, corpus = run_of(Case(architecture=case.architecture, changes=changes), two)
    model: Any
    config = None if case.architecture == USERS else config_of(case.architecture)
    if config is None:
        model = build(Config(**FIELDS[USERS]))
        fill_of_seed(model, resolved)
    elif folder is None:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fill_of_seed(model, resolved)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    round_base(model, case)
    if "lora_rank" in case.changes:
        model = with_peft(model, case)
    model.train()
    groups = parameter_groups(model, BASE["weight_decay"])
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        groups, lr=BASE["lr"], betas=(0.9, 0.95), eps=1e-8
    )
    if "optimizer" in changes:  # of one process, whose matrices are whole
        optimizer = build_optimizer(model, resolved.config.optim)
    batches = GlobalBatches(
        corpus.train,
        seq_len=resolved.seq_len,
        global_batch=resolved.global_batch,
        seed=BASE["seed"],
    )
    losses = []
    for step in range(STEPS):
        of_ranks = [batches.rank_slice(step, rank=rank, world_size=2) for rank in range(2)]
        cpu = torch.device("cpu")
        micro_batches = [one for mine in of_ranks for one in to_device(mine, 2, cpu)]
        learned, total = sum(int((one[1] != -100).sum()) for one in micro_batches), 0.0
        for tokens, targets, *starts in micro_batches:
            more: dict[str, Any] = {}
            if starts:  # with a cache it would not look at positions
                positions = torch.arange(tokens.size(1)) - starts[0]
                more = {"position_ids": positions, "use_cache": False}
            output: Any = model(tokens, **more)
            logits = output if config is None else output.logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            if config is not None and getattr(config, "output_router_logits", False):
                loss = loss + config.router_aux_loss_coef * output.aux_loss
            share = int((targets != -100).sum()) / learned
            (loss * share).backward()
            total += loss.item() * share
        torch.nn.utils.clip_grad_norm_(model.parameters(), BASE["clip"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {"losses": losses}


def round_base(model: Any, case: Case) -> None:
    """Give weights the values that their quantised ones have."""
    if (kind := case.changes.get("quantize_base")) is not None:
        for _, _, linear in linears(model):
            packed = quantize(linear.weight.data, kind)
            linear.weight.data = dequantize(packed, linear.in_features, kind, torch.float32)


def with_peft(model: Any, case: Case) -> Any:
    """Adapters of PEFT with the values that ours begin with."""
    from peft import LoraConfig, get_peft_model

    changes = {**BASE, **case.changes, "init_from": case.architecture, "decoder": "transformers"}
    ours = parse_run_config(as_flags(changes).split()).model.build()
    names = TARGETS[case.architecture]
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=names))
    adapted = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own, half = name.removeprefix("base_model.model.").split(".lora_")
            own_name = f"causal.{own}.lora_{half[0].lower()}"
            values = initial_value(own_name, parameter.shape, ours, seed=BASE["seed"], device="cpu")
            parameter.data.copy_(values)
            adapted += parameter.numel()
    assert adapted == ours.trained_parameter_count
    return model


def fill_of_seed(model: Any, resolved: Resolved) -> None:
    """Give it the values that our decoder begins with."""
    weights = {
        name.removeprefix("causal.").removeprefix("inner."): initial_value(
            name, shape, resolved.model, seed=BASE["seed"], device="cpu"
        )
        for name, shape in parameter_shapes(resolved.model).items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= set(getattr(model, "all_tied_weights_keys", ())), missing
    assert not unexpected


if __name__ == "__main__":
    main()
