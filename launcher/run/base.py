"""The weights that a run begins with, or that its adapters are trained beside."""

from launcher.checkpoint import Checkpoint
from launcher.checkpoint.extra import Base
from launcher.config.resolve import Resolved
from launcher.util.errors import UserError, naming


def base_of(resolved: Resolved) -> Base | None:
    """What a run's adapters are beside; None where it has none. Reads all of it.

    Raises:
        UserError: it is not there, or damaged.
    """
    if resolved.model.lora is None:
        return None
    folder = resolved.config.model.init_from
    if folder is not None:
        from launcher.checkpoint.pretrained.stored import open_stored

        with naming("--init-from"), open_stored(folder) as weights:
            return weights.base()
    # Values are the same on one type of device.
    seed, device = resolved.config.loop.seed, resolved.config.loop.device
    return Base(seed=seed, fingerprint=f"seed {seed} on {device}")


def same_base(checkpoint: Checkpoint, resolved: Resolved) -> UserError | None:
    """Why a checkpoint's adapters do not belong to the weights of this run, or None."""
    base = base_of(resolved)
    if base is None:
        return None
    from launcher.checkpoint.pretrained.stored import check_base

    try:
        check_base(checkpoint, base)
    except UserError as error:
        return error
    return None


def check_beginning(resolved: Resolved) -> None:
    """The weights of `--init-from`, where it is given, are there, and of this run's model.

    Raises:
        UserError: they are not, or lack masks that are asked for, or there are adapters among them
            that the run does not have, or no tokenizer; or adapters have no weights beside them.
    """
    folder, masks = resolved.config.model.init_from, resolved.model.masks
    if folder is None:
        if masks:
            raise UserError(
                "--masks holds what shardscale prune has removed: give --init-from a run that it "
                "has made, or leave --masks out"
            )
        lora = resolved.model.lora
        if lora is not None and not resolved.config.model.random_base:
            raise UserError(
                f"--lora-rank {lora.rank} without --init-from trains adapters beside random "
                "weights: give --init-from FOLDER with the weights, or --random-base to measure "
                "memory and speed"
            )
        return
    from launcher.checkpoint.pretrained.stored import open_stored

    with naming("--init-from"), open_stored(folder) as weights:
        if masks and not weights.config.masks:
            raise UserError(
                f"{folder}: has no masks that --masks could hold: make them with shardscale prune, "
                "or leave --masks out"
            )
        if weights.config.lora is not None and resolved.model.lora is None:
            raise UserError(
                f"{folder}: has adapters, and this run trains all weights: merge them first with "
                "shardscale export --merge, or give the --lora-rank that they have"
            )
    if resolved.config.data.tokenizer == "bpe":  # it would be trained, and its ids mean other text
        raise UserError(
            f"--init-from {folder}: has no tokenizer.json: give --tokenizer FILE with the one that "
            "its weights were trained with"
        )
