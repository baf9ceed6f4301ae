"""What strategies say of themselves, and that nobody else keeps a table of them."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.config.sharding import Strategy
from launcher.forecast.candidates import choices
from launcher.forecast.predict import predict
from launcher.strategies import STRATEGIES, VARIANTS, base, strategy_of, variant_of
from launcher.util.errors import UserError

LAUNCHER = Path(__file__).parents[3] / "launcher"

# Where the words of a user are taken apart, and the strategies themselves.
MAY = ("config/", "strategies/")


def test_each_strategy_of_the_flag_is_registered() -> None:
    assert tuple(STRATEGIES) == get_args(Strategy)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_variant_is_what_its_fields_resolve_to(variant: base.Variant) -> None:
    config = RunConfig().replace(**variant.fields)
    if variant.replicates:
        config = config.replace(replicate=2)
    ranks = 4 if strategy_of(config).needs_group else 1
    resolved = resolve(config, world_size=ranks, device_type="cpu")
    assert variant_of(resolved.config) is variant
    for fields in variant.offloads.values():
        offloaded = resolve(config.replace(**fields), world_size=ranks, device_type="cpu")
        assert variant_of(offloaded.config) is variant


def test_nobody_else_compares_strategies() -> None:
    found = [
        f"{path.relative_to(LAUNCHER)}:{number}: {line.strip()}"
        for path in LAUNCHER.rglob("*.py")
        if not str(path.relative_to(LAUNCHER)).startswith(MAY)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"\.strategy (==|!=|in|not in) |\.zero (==|!=|in|not in) ", line)
    ]
    assert found == []


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    known = {"torch": "2.13.0", "deepspeed": "0.19.8"} | versions
    monkeypatch.setattr(base, "version_of", known.get)


def test_no_number_for_a_version_that_nobody_has_held_it_against(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: dict[str, Any] = {"world_size": 2, "ranks_per_node": 2, "device_type": "cpu"}
    run = resolve(RunConfig().replace(zero=2), world_size=2, device_type="cpu")
    pretend(monkeypatch, deepspeed="9.9.9")
    with pytest.raises(UserError, match=r"zero are known for deepspeed 0\.19, and this is 9\.9\.9"):
        predict(run)
    left = {choice.label for choice in choices(RunConfig(), set(), **places)}
    assert left == {"ddp", "fsdp", "fsdp-grad-op", "fsdp+cpu"}
    pretend(monkeypatch, torch="9.9.9+cu")
    with pytest.raises(UserError, match=r"for torch 2.11, 2.13, 2.14, 2.15, and this is 9\.9\.9"):
        choices(RunConfig(), set(), **places)
