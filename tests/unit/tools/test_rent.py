"""`plan --rent`: GPUs by what a training costs on them, from dated prices."""

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.tools.rent.prices import OWN, read_prices
from launcher.tools.rent.rent_cli import main

MODEL = ["--model", "gpt2", "--precision", "bf16", "--seq-len", "256", "--micro-batch", "4"]
MODEL += ["--global-batch", "8", "--strategy", "ddp", "--activation-checkpointing", "none"]
OFFER = "  - {gpu: %s, provider: %s, per_gpu_hour: %s, gpus: %s, read: 2026-01-02, source: here}\n"


def prices(folder: Path, *offers: tuple[object, ...], power: str = "{H100: 700}") -> Path:
    path = folder / "prices.yaml"
    lines = "".join(OFFER % offer for offer in offers)
    path.write_text(f"currency: EUR\noffers:\n{lines}power_w: {power}\n")
    return path


def records(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    main(["--rent", "--tokens", "1e9", "--prices", str(path), "--json", *MODEL, *more])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_the_cheapest_is_first_and_ranges_follow_the_prices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prices(
        tmp_path,
        ("H100", "dear", 9.0, "[2]"),
        ("H100", "fair", 3.0, "[2]"),
        ("L4", "a", 9.0, "[2]"),
    )
    first, second = records(path, capsys)
    assert (first["gpu"], first["gpus"], first["currency"]) == ("H100", 2, "EUR")
    assert second["gpu"] == "L4"
    least, most = first["hours"]
    assert first["cost"] == pytest.approx([6 * least, 6 * most])  # two GPUs of the fair offer
    assert first["most_kwh"] == pytest.approx(1.4 * most)
    assert second["most_kwh"] is None
    assert [offer["provider"] for offer in first["offers"]] == ["fair", "dear"]


def test_a_tie_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prices(tmp_path, ("H100", "a", 3.0, "[2]"), ("H200", "b", 3.1, "[2]"))
    asked = ["--rent", "--tokens", "1e9", "--prices", str(path), *MODEL]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "prices of 2026-01-02 in EUR" in said
    assert "= the range overlaps the cheapest one's: a tie" in said
    path = prices(tmp_path, ("H100", "a", 3.0, "[2]"), ("H200", "b", 31.0, "[2]"))
    assert main(asked) == 0
    assert "a tie" not in capsys.readouterr().out


def test_what_is_late_or_does_not_fit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prices(tmp_path, ("H100", "a", 3.0, "[2]"), ("L4", "a", 0.1, "[2]"))
    hours = {str(each["gpu"]): each["hours"] for each in records(path, capsys)}
    between = str((hours["H100"][1] + hours["L4"][0]) / 2)
    asked = ["--rent", "--tokens", "1e9", "--prices", str(path), *MODEL]
    assert main([*asked, "--deadline-hours", between]) == 0
    assert "later than the deadline: 2 x L4" in capsys.readouterr().out
    large = ["--model", "gpt2-xl", "--micro-batch", "64", "--global-batch", "128"]
    assert main([*asked, "--gpu", "L4", *large]) == 1
    assert "2 x L4: does not fit with room" in capsys.readouterr().out


def test_what_flags_rule_out_is_named_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prices(tmp_path, ("H100", "a", 3.0, "[2, 3]"), ("A100-80GB", "a", 1.0, "[2]"))
    asked = ["--rent", "--tokens", "1e9", "--prices", str(path), *MODEL, "--precision", "fp8"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "3 x H100: --global-batch 8 " in said
    assert "2 x A100-80GB: --precision fp8: A100-80GB has no matmuls in fp8" in said
    assert main([*asked, "--gpu", "A100-80GB"]) == 2
    assert "no matmuls in fp8" in capsys.readouterr().err


def test_a_number_of_gpus_that_the_flags_reject_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prices(tmp_path, ("H100", "a", 3.0, "[1, 2]"))
    asked = ["--rent", "--tokens", "1e9", "--prices", str(path), *MODEL]
    assert main([*asked, "--tensor-parallel", "2"]) == 0
    said = capsys.readouterr().out
    assert "1 x H100: --tensor-parallel 2 needs 2 ranks" in " ".join(said.split())
    assert main([*asked, "--tensor-parallel", "4"]) == 2
    assert "--tensor-parallel 4 needs 4 ranks" in capsys.readouterr().err


def test_the_prices_of_this_version_have_sources_and_dates() -> None:
    own = read_prices(OWN)
    assert len(own.offers) >= 15
    assert all(offer.read >= "2026-01-01" and "." in offer.source for offer in own.offers)
    assert {offer.gpu for offer in own.offers} <= own.power_w.keys()


@pytest.mark.parametrize(
    ("offer", "sentence"),
    [
        (("X9", "a", 3, "[1]"), "offer 1: gpu X9 is not known"),
        (("H100", "a", -3, "[1]"), "offer 1: per_gpu_hour must be a price above 0"),
        (("H100", "a", 3, "[0]"), "offer 1: gpus must be a list of numbers of GPUs"),
    ],
)
def test_a_wrong_price_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], offer: tuple[object, ...], sentence: str
) -> None:
    path = prices(tmp_path, offer)
    assert main(["--rent", "--tokens", "1e9", "--prices", str(path), *MODEL]) == 2
    assert sentence in capsys.readouterr().err


def test_missing_tokens_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rent", *MODEL]) == 2
    assert "--rent needs the tokens to train on: give --tokens 2e9" in capsys.readouterr().err


def test_a_gpu_is_asked_for_in_any_capitals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that has no offer is named, beside those that have."""
    path = prices(tmp_path, ("H100", "a", 3.0, "[2]"), ("L4", "a", 0.1, "[2]"))
    assert [each["gpu"] for each in records(path, capsys, "--gpu", "h100")] == ["H100"]
    asked = ["--rent", "--tokens", "1e9", "--prices", str(path), *MODEL, "--gpu"]
    assert main([*asked, "h100", "--gpus", "4"]) == 2
    said = "--gpu h100 --gpus 4: --prices prices.yaml has no such offer: it has --gpus 2\n"
    assert capsys.readouterr().err == f"shardscale: {said}"
    assert main([*asked, "T4"]) == 2
    assert "--gpu T4: --prices prices.yaml has no such offer: it has H100, L4" in (
        capsys.readouterr().err
    )
