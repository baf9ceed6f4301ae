"""One table of keys per trainer, in `KINDS`; nothing else names one."""

from launcher.tools.plan_from.keys import Kind
from launcher.tools.plan_from.kinds.accelerate import ACCELERATE
from launcher.tools.plan_from.kinds.axolotl import AXOLOTL
from launcher.tools.plan_from.kinds.deepspeed import DEEPSPEED
from launcher.tools.plan_from.kinds.litgpt import LITGPT
from launcher.tools.plan_from.kinds.llama_factory import LLAMA_FACTORY
from launcher.tools.plan_from.kinds.llama_factory_v1 import LLAMA_FACTORY_V1
from launcher.tools.plan_from.kinds.torchtitan import TORCHTITAN, TORCHTITAN_FLAGS
from launcher.tools.plan_from.kinds.torchtune import TORCHTUNE
from launcher.tools.plan_from.kinds.transformers import TRAINING_ARGUMENTS
from launcher.tools.plan_from.kinds.trl import TRL

KINDS: tuple[Kind, ...] = (
    DEEPSPEED,
    AXOLOTL,
    LLAMA_FACTORY,
    LLAMA_FACTORY_V1,
    LITGPT,
    TORCHTITAN,
    TORCHTITAN_FLAGS,
    TORCHTUNE,
    TRL,
    TRAINING_ARGUMENTS,
    ACCELERATE,
)
"""In the order in which they are taken, where two have as many marks in a file: accelerate last,
whose flags launch others."""
