"""Parts of 25 minutes on a GPU, the most valuable first; sections of LATER take 16 more.

Budgets are seconds that the parts took on an H200 with 16 slow cores, rounded up to 5. Those of
parts without a result in bench/results/gpu-h200 are estimates.
"""

from collections.abc import Iterator

from runner import Part

SEED = ("--model", "seed-134m", "--micro-batch", "125", "--lr", "5e-4")
BF16 = (*SEED, "--precision", "bf16")
# As large as seed-134m, with RoPE, RMSNorm and SwiGLU; bench/step_budget.py has it, too.
LLAMA = (
    *("--model", "llama-3.2-1b", "--layers", "12", "--d-model", "768", "--heads", "12"),
    *("--kv-heads", "12", "--d-ff", "2048", "--vocab-size", "32000", "--context", "256"),
    *("--micro-batch", "125", "--lr", "5e-4"),
)
LATER = ("decoders", "inference")
"""Sections that come after 25 minutes."""
SMALL = ("--model", "seed-134m", "--micro-batch", "8", "--lr", "5e-4")


def parts() -> list[Part]:
    """All parts in their order."""
    sections = (default, kernels, strategies, precision, compiled, peers, decoders, inference)
    return [part for section in sections for part in section()]


def training(section: str, name: str, budget_s: int, *flags: str) -> Part:
    words = ("{python}", "bench/gpu/one_run.py", "{out}", *flags)
    return Part(section=section, name=name, words=words, budget_s=budget_s)


def script(section: str, name: str, budget_s: int, *words: str) -> Part:
    return Part(section=section, name=name, words=("{python}", *words), budget_s=budget_s)


def tests(section: str, name: str, budget_s: int, *words: str) -> Part:
    pytest = ("-m", "pytest", "-q", "--tb", "short", "-p", "no:cacheprovider")
    return script(section, name, budget_s, *pytest, *words)


def default() -> Iterator[Part]:
    """Runs with default flags, their ledgers against the plan, and where their time goes."""
    yield training("default", "run", 30, "--hold-ledger", *SEED)
    yield training("default", "llama", 25, "--hold-ledger", *LLAMA, "--compile", "off")
    yield training("default", "llama-compiled", 40, "--hold-ledger", *LLAMA, "--compile", "on")
    yield training("default", "small", 25, "--hold-ledger", *SMALL)
    eager = ("--cuda-graphs", "off")
    yield training("default", "small-eager", 25, "--hold-ledger", *SMALL, *eager)
    yield script("default", "rates", 30, "-m", "launcher", "profile", "--out", "{out}/rates.json")
    yield script("default", "doctor", 10, "-m", "launcher", "doctor")
    operators = ("bench/gpu/operators.py", "{out}")
    yield script("default", "operators", 15, *operators, *SEED)
    yield script("default", "operators-llama", 15, *operators, *LLAMA, "--compile", "off")
    for name, flags in (("", SEED), ("-llama", LLAMA)):
        compiled = (*operators, *flags, "--compile", "on")
        yield script("default", f"operators{name}-compiled", 25, *compiled)
    limited = ("--model", "seed-134m", "--precision", "bf16", "--memory-limit", "48GiB")
    yield training("default", "largest-batch", 65, *limited, "--micro-batch", "auto")


def kernels() -> Iterator[Part]:
    """Values of kernels against torch's operators and transformers' models, then their times."""
    names = (
        *("loss_kernel", "layer_kernels", "optim_kernels", "foreign_norms"),
        *("attention", "transformers"),
    )
    files = (f"tests/gpu/test_{name}.py" for name in names)
    chosen = ("-n", "8", *files, "-k", "not flex and not compiled")
    yield tests("kernels", "values", 45, *chosen)
    yield script("kernels", "times", 35, "bench/gpu/kernels.py", "{out}/times.json")


def strategies() -> Iterator[Part]:
    """Each strategy with one rank over NCCL: ledger, time, and losses against a single process."""
    choices = {
        "fsdp": (30, "--strategy", "fsdp"),
        "ddp": (25, "--strategy", "ddp"),
        "zero3": (35, "--zero", "3"),
        "zero2": (35, "--zero", "2"),
        "zero1": (25, "--zero", "1"),
        "selective": (25, "--activation-checkpointing", "selective"),
        "activations-offloaded": (20, "--activation-checkpointing", "offload"),
    }
    for name, (budget_s, *flags) in choices.items():
        yield training("strategies", name, budget_s, "--hold-ledger", *BF16, *flags)
    offloaded = ("--zero", "2", "--offload-optimizer", "cpu")  # compiles DeepSpeed's Adam
    yield training("strategies", "optimizer-offloaded", 40, "--hold-ledger", *BF16, *offloaded)
    files = (f"tests/gpu/test_{name}.py" for name in ("gpu", "gpu_offload", "gpu_pruned"))
    yield tests("strategies", "parity", 80, "-n", "8", *files, "-k", "not bf16")


def precision() -> Iterator[Part]:
    """The same 40 steps in each precision: fp32's losses are the reference."""
    yield training("precision", "fp32", 40, *SEED, "--precision", "fp32")
    yield training("precision", "bf16-pure", 25, *SEED, "--precision", "bf16-pure")
    yield training("precision", "fp16", 25, *SEED, "--precision", "fp16")
    yield training("precision", "fp8", 35, *SEED, "--precision", "fp8")
    yield training("precision", "adamw8bit", 25, *BF16, "--optimizer", "adamw8bit")


def compiled() -> Iterator[Part]:
    """Yield the parts that show what torch.compile and FlexAttention change."""
    on = ("--compile", "on")
    yield training("compile", "bf16", 40, *BF16, *on)
    yield training("compile", "fsdp", 35, *BF16, *on, "--strategy", "fsdp")
    yield training("compile", "fp8", 45, *SEED, "--precision", "fp8", *on)
    attention = ("tests/gpu/test_attention.py", "-k", "compiled and sdpa or flex and 300")
    yield tests("compile", "attention", 55, "-n", "8", *attention)


def decoders() -> Iterator[Part]:
    """Decoders of transformers: ledger, time, and losses against the same run without the flag."""
    shape = ("--micro-batch", "64", "--lr", "5e-4")
    choices: dict[str, dict[str, tuple[str, ...]]] = {
        "phi3": {
            "default": ("--compile", "off"),
            "compiled": ("--compile", "on"),
            "fp8": ("--precision", "fp8"),
            "selective": ("--activation-checkpointing", "selective"),
            "muon": ("--optimizer", "muon"),
        },
        "gemma2": {
            "default": ("--compile", "off"),
            "offload": ("--activation-checkpointing", "offload"),
            "compiled": ("--compile", "on"),
            "fsdp": ("--strategy", "fsdp"),
            "nf4": ("--lora-rank", "8", "--random-base", "--quantize-base", "nf4"),
        },
        "gemma3_text": {"default": ("--compile", "off"), "compiled": ("--compile", "on")},
        "olmo2": {"default": ("--compile", "off"), "compiled": ("--compile", "on")},
        "mixtral": {
            "default": ("--compile", "off"),
            "fsdp": ("--strategy", "fsdp"),
            "zero3": ("--zero", "3"),
        },
        "gpt_oss": {"default": ("--compile", "off")},
    }
    for name, ways in choices.items():
        for way, flags in ways.items():
            of = ("--hold-ledger", "--decoder", name, *shape, *flags)
            yield training("decoders", f"{name}-{way}", 55 if way == "compiled" else 40, *of)


def peers() -> Iterator[Part]:
    """Other people's programs, rehearsed and run; transformers' GPT-2 under accelerate, Lightning
    Fabric and DeepSpeed, in turn with ours."""
    yield script("peers", "rehearsed", 145, "bench/gpu/rehearsed.py", "{out}")
    bench = ("bench/peers.py", "--size", "full", "--precisions", "bf16", "--output", "{out}")
    both = ("--cases", "single", "--flags", "defaults", "selective")
    yield script("peers", "single", 80, *bench, *both)
    yield script("peers", "zero3", 60, *bench, "--cases", "zero3", "--flags", "defaults")
    fast = ("--cases", "single", "--flags", "both-compile", "--peers", "accelerate")
    yield script("peers", "both-compile", 80, *bench, *fast)


def inference() -> Iterator[Part]:
    """PyTorch as it is and compiled; TensorRT where the machine has it."""
    yield tests("inference", "tests", 140, "tests/gpu/test_inference.py")
