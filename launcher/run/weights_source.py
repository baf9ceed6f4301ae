"""Find the weights that a run begins with: of --init-from, or the checkpoint of --resume."""

from pathlib import Path

from launcher.config.schema import RunConfig
from launcher.run.resume import AUTO
from launcher.util.errors import UserError


def check_weights_source(config: RunConfig, source: Path | None) -> None:
    """Refuse --init-from beside --resume, except for the weights that the resumed run began with.

    Args:
        source: checkpoint or run that is resumed, if any.

    Raises:
        UserError: both name weights, and the checkpoint's run began with others.
    """
    folder, resume = config.model.init_from, config.loop.resume
    if folder is None or source is None or resume in (None, AUTO):
        return
    if config.model.lora_rank is not None:
        return  # adapters continue beside frozen weights, whose fingerprint is compared
    from launcher.run.provenance import newest_extra

    # A run's config.yaml names them; the checkpoint's own weights replace them.
    began = ((newest_extra(source) or {}).get("config") or {}).get("init_from")
    if began is None or Path(began).resolve() != folder.resolve():
        raise UserError(
            f"--init-from {folder} and --resume {resume} both say where weights come from: give "
            "--resume to continue with that run's optimizer, --init-from to start a new run"
        )
