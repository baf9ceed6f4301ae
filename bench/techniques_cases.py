"""What each technique saves, by hand: pairs of runs, and the arithmetic of their difference.

Symbols: M tokens in a micro-batch, d width, L layers, V vocabulary, T sequence length, H heads,
P parameters, n the largest parameter's elements. All sizes are bytes, so a token's fp32 row of
width d is 4 M d.

A layer keeps for its backward, in units of M d bytes in fp32: its input 4, the first norm's output
4, q, k and v 12, the attention's output 4, the sum after attention 4, the second norm's output 4,
the MLP before GELU 16, from which backward makes what is behind it: together 48 M d. What is left
out everywhere: norms' means, the attention's log-sum-exp, biases (below half a percent in these
shapes).

Where the highest moment is decides what counts. In the `wide` shape it is the backward of the loss,
when nothing is freed yet and 3 fp32 copies of the logits are alive (12 M V); in the `states`
shapes, of a few tokens only, the end of the backward and the optimizer's step, when parameters,
gradients and both moments are (16 P).
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder like seed-134m (untied, no attention biases), scaled down."""

    name: str
    layers: int
    vocab: int
    micro_batch: int
    seq_len: int = 256
    d: int = 128
    heads: int = 2

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.seq_len

    @property
    def unit(self) -> int:
        """M d."""
        return self.tokens * self.d

    @property
    def largest(self) -> int:
        return max(self.vocab * self.d, 4 * self.d**2)

    @property
    def matmul_parameters(self) -> int:
        return 12 * self.d**2 * self.layers + self.vocab * self.d

    @property
    def block_parameters(self) -> int:
        """Four matrices, the MLP's biases, two norms."""
        return 12 * self.d**2 + 5 * self.d + 4 * self.d

    @property
    def parameters(self) -> int:
        """The blocks, embedding and head, 256 positions, the last norm."""
        whole = 2 * self.vocab * self.d + 256 * self.d + 2 * self.d
        return self.layers * self.block_parameters + whole

    @property
    def logits(self) -> int:
        """M V."""
        return self.tokens * self.vocab

    def flags(self) -> list[str]:
        return [
            "--model=seed-134m",
            f"--layers={self.layers}",
            f"--d-model={self.d}",
            f"--heads={self.heads}",
            f"--vocab-size={self.vocab}",
            f"--seq-len={self.seq_len}",
        ]


WIDE = Shape(name="wide", layers=4, vocab=512, micro_batch=16)
HEAD = Shape(name="large vocabulary", layers=2, vocab=8192, micro_batch=8)
STATES = Shape(name="states", layers=12, vocab=512, micro_batch=1, seq_len=16)
RANKS = Shape(name="states, 2 processes", layers=24, vocab=512, micro_batch=1, seq_len=16)
CHUNK_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A pair of runs: `flags` against `without`, which both have the shape's flags.

    `saving`'s docstring is the formula, shown in the table; its sign is that of what is saved.
    """

    name: str
    shape: Shape
    flags: tuple[str, ...]
    saving: Callable[[Shape], float]
    without: tuple[str, ...] = ()
    ranks: int = 1


def bf16(s: Shape) -> float:
    """24 L M d + 4 M d - 2 W: all activations in 2 bytes, into and out of the last norm too;
    autocast keeps a bf16 copy of the W matmul weights"""
    return 24 * s.layers * s.unit + 4 * s.unit - 2 * s.matmul_parameters


def bf16_pure(s: Shape) -> float:
    """24 L M d + 4 M d + 4 P: all activations in 2 bytes, into and out of the last norm too;
    parameters, moments and compensation 8 P instead of 12 P"""
    return 24 * s.layers * s.unit + 4 * s.unit + 4 * s.parameters


def full(s: Shape) -> float:
    """44 L M d - 72 M d + 12 M V - 4 V d: a block keeps 4; the peak moves into a block's backward:
    60 recomputed (also what is behind GELU) + 4 + 16 of gradients, without the loss's 8 M d + 12
    M V, beside the head's gradient"""
    return (44 * s.layers - 72) * s.unit + 12 * s.logits - 4 * s.vocab * s.d


def selective(s: Shape) -> float:
    """8 L M d: kept are the input 4, q, k and v 12, attention 4, projection 4 and the MLP's first
    matmul 16, so 40 of 48"""
    return 8 * s.layers * s.unit


def every_second(s: Shape) -> float:
    """22 L M d - 72 M d + 12 M V - 4 V d: as all blocks, the last too, but half of them keep 48"""
    return full(s) - 22 * s.layers * s.unit


def chunked_loss(s: Shape) -> float:
    """12 M V - 8 r V - 4 V d - 4 M d: 3 copies of all logits become 2 of r = 256 rows, and the
    gradients of the head's weight and input, which are computed on the way"""
    return (12 * s.tokens - 8 * CHUNK_ROWS - 4 * s.d) * s.vocab - 4 * s.unit


def accumulation(s: Shape) -> float:
    """3/4 (48 L M d + 8 M d + 12 M V) - 4 P: a quarter of the activations at a time, but gradients
    are there while they are"""
    whole = (48 * s.layers + 8) * s.unit + 12 * s.logits
    return 0.75 * whole - 4 * s.parameters


def fused_attention(s: Shape) -> float:
    """L (4 H T M + T T - 4 H M): softmax of H x T per token, and its T x T mask, against a
    log-sum-exp; the copies that the eager form makes of q, k and v replace the fused projection"""
    per_layer = 4 * s.heads * s.tokens * (s.seq_len - 1) + s.seq_len**2
    return s.layers * per_layer


def window(s: Shape) -> float:
    """-4 L T T: saves time, not memory: a CPU takes the window as an fp32 mask, which each layer
    keeps for its backward"""
    return -4 * s.layers * s.seq_len**2


def eight_bits(s: Shape) -> float:
    """6 P - 8 P / 256 - 25 n: two bytes instead of eight, an fp32 scale per block of 256, and both
    moments of one parameter in fp32 with the codes being made (4 + 4 + 8 + 8 + 1)"""
    return 6 * s.parameters - 8 * s.parameters / 256 - 25 * s.largest


def bf16_moments(s: Shape) -> float:
    """4 P - 16 n: both moments in 2 bytes; of one parameter in fp32 (4 + 4) with the update's two
    temporaries (4 + 4)"""
    return 4 * s.parameters - 16 * s.largest


def adafactor(s: Shape) -> float:
    """8 P - 4 R - 12 n: rows + columns R of each matrix instead of two moments; of one parameter
    the square, the estimate and one temporary in fp32"""
    matrices = s.layers * (4 + 2 + 5 + 5) * s.d + 2 * (s.vocab + s.d) + 256 + s.d
    vectors = s.layers * (5 + 4) * s.d + 2 * s.d
    return 8 * s.parameters - 4 * (matrices + vectors) - 12 * s.largest


def sgd(s: Shape) -> float:
    """4 P: one moment instead of two"""
    return 4 * s.parameters


def sgd_without_momentum(s: Shape) -> float:
    """8 P: none instead of two"""
    return 8 * s.parameters


def pure_states(s: Shape) -> float:
    """6 P - 24 n: weight, gradient, both moments and compensation 2 bytes each, 10 P instead of
    16 P; of one parameter gradient, moments, weight and two temporaries in fp32"""
    return 6 * s.parameters - 24 * s.largest


def in_backward(s: Shape) -> float:
    """4 P - 48 L M d - 4 n: one gradient at a time; the peak moves to the backward's begin, where
    the activations are"""
    return 4 * s.parameters - 48 * s.layers * s.unit - 4 * s.largest


# On 2 processes, against DDP: there everything is held, 16 P, and at the begin of the backward the
# activations and the head's first gradient besides, 48 L M d + 4 n. p are a block's parameters.


def fsdp(s: Shape) -> float:
    """8 P + 48 L M d + 4 n - 14 p: half of the states. In a block's backward: its weights and the
    next one's gathered, its gradients and their copy for the reduce-scatter (16 p), their shard
    (2 p), while two blocks' shards are still to come (4 p)"""
    return _of_ddp(s) + 8 * s.parameters - 14 * s.block_parameters


def fsdp_grad_op(s: Shape) -> float:
    """6 P + 48 M d - 4 p - 4 n: weights 4 P stay gathered beside shards of weights and moments
    6 P. The peak is where the forward turns: the last block's and the head's buffers of gathering
    (4 p + 8 n), all other blocks' activations"""
    own = 48 * (s.layers - 1) * s.unit + 4 * s.block_parameters + 8 * s.largest
    return _of_ddp(s) + 6 * s.parameters - own


def zero1(s: Shape) -> float:
    """48 L M d + 4 n, and nothing of P: moments are halved to 4 P, but DeepSpeed keeps a half of
    fp32 master weights beside fp32 weights (2 P), and a half of averaged gradients beside the
    whole ones (2 P): 4 + 2 + 4 + 4 + 2 = 16 P at the end of the backward"""
    return _of_ddp(s)


def zero2(s: Shape) -> float:
    """2 P + 48 L M d + 4 n: weights 4 P, master weights 2 P, moments 4 P, gradients 2 P and their
    flat copy for the step 2 P: 14 P"""
    return _of_ddp(s) + 2 * s.parameters


def zero3(s: Shape) -> float:
    """4 P + 48 L M d + 4 n - 4 p: as ZeRO-2 with half of the weights, 12 P, and the bucket of
    gradients, one block, which stays"""
    return _of_ddp(s) + 4 * s.parameters - 4 * s.block_parameters


def _of_ddp(s: Shape) -> float:
    """Return the bytes that DDP's peak has besides 16 P."""
    return 48 * s.layers * s.unit + 4 * s.largest


DDP = ("--strategy=ddp",)
ACCUMULATED = (f"--micro-batch={WIDE.micro_batch // 4}", f"--global-batch={WIDE.micro_batch}")
ONE_MEMORY = "on a CPU the device's memory is the host's: see bench/offload.py on a GPU"


def _pair(
    name: str,
    shape: Shape,
    flags: str,
    saving: Callable[[Shape], float],
    *,
    without: tuple[str, ...] = (),
) -> Technique:
    ranks = 2 if shape is RANKS else 1
    return Technique(
        name=name,
        shape=shape,
        flags=tuple(flags.split()),
        saving=saving,
        without=DDP if shape is RANKS else without,
        ranks=ranks,
    )


TECHNIQUES = (
    _pair("bf16", WIDE, "--precision=bf16", bf16),
    _pair("bf16-pure, activations", WIDE, "--precision=bf16-pure", bf16_pure),
    _pair("bf16-pure, states", STATES, "--precision=bf16-pure", pure_states),
    _pair("full checkpointing", WIDE, "--activation-checkpointing=full", full),
    _pair("selective checkpointing", WIDE, "--activation-checkpointing=selective", selective),
    _pair("every second block", WIDE, "--activation-checkpointing=every=2", every_second),
    # 40 L M d, and attention's logarithm of a sum per token and head.
    _pair("budget", WIDE, "--activation-checkpointing=budget=80.125MiB", selective),
    _pair("activation offload", WIDE, "--activation-checkpointing=offload", full),
    _pair(
        *("chunked loss", HEAD, f"--loss-chunk={CHUNK_ROWS}", chunked_loss),
        without=("--loss-chunk=0",),
    ),
    _pair("accumulation, micro-batch 16 to 4", WIDE, " ".join(ACCUMULATED), accumulation),
    _pair("sdpa for eager", WIDE, "", fused_attention, without=("--attention=eager",)),
    _pair("window 64", WIDE, "--window=64", window),
    _pair("adamw8bit", STATES, "--optimizer=adamw8bit", eight_bits),
    _pair("moments in bf16", STATES, "--moments-dtype=bf16", bf16_moments),
    _pair("adafactor", STATES, "--optimizer=adafactor", adafactor),
    _pair("sgd", STATES, "--optimizer=sgd", sgd),
    _pair("sgd without momentum", STATES, "--optimizer=sgd --momentum=0", sgd_without_momentum),
    _pair(
        *("optimizer in backward", STATES, "--clip=0 --optimizer-in-backward", in_backward),
        without=("--clip=0",),
    ),
    _pair("fsdp x 2", RANKS, "--strategy=fsdp", fsdp),
    _pair("fsdp x 2, grad op", RANKS, "--strategy=fsdp --no-reshard-after-forward", fsdp_grad_op),
    _pair("zero1 x 2", RANKS, "--zero=1", zero1),
    _pair("zero2 x 2", RANKS, "--zero=2", zero2),
    _pair("zero3 x 2", RANKS, "--zero=3", zero3),
)
# What a CPU has no second memory for.
_OFFLOADS = ("optimizer offload to host memory", "parameter offload to host memory")
UNMEASURED = dict.fromkeys((*_OFFLOADS, "offload to NVMe"), ONE_MEMORY)
