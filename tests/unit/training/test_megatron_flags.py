"""The table of Megatron-LM's flags that are known and not implemented."""

import re

import pytest

from megatron.training import megatron_flags
from megatron.training.megatron_flags import MEGATRON_FLAGS, Takes, Verdict


@pytest.mark.parametrize("flag", MEGATRON_FLAGS)
def test_flag_is_written_as_on_a_command_line(flag: str) -> None:
    assert re.fullmatch(r"--[a-z0-9]+(-[a-z0-9]+)*", flag)


@pytest.mark.parametrize("flag", MEGATRON_FLAGS)
def test_reason_is_a_phrase(flag: str) -> None:
    reason = MEGATRON_FLAGS[flag].reason
    assert reason
    assert reason == reason.strip()
    assert not reason.endswith(".")


@pytest.mark.parametrize("text", ["harmless\n    --some-flag\nharmful\n    --some-flag=", "harmless\n    --a --a"])
def test_flag_cannot_be_listed_twice(text: str) -> None:
    with pytest.raises(ValueError, match="listed twice"):
        megatron_flags._table({Verdict.IGNORED: text})


def test_flag_cannot_have_two_verdicts() -> None:
    with pytest.raises(ValueError, match="listed twice: --some-flag"):
        megatron_flags._table(
            {Verdict.IGNORED: "harmless\n    --some-flag", Verdict.REFUSED: "harmful\n    --some-flag"}
        )


@pytest.mark.parametrize(
    ("flag", "takes", "verdict"),
    [
        ("--profile", Takes.NONE, Verdict.IGNORED),
        ("--profile-ranks", Takes.MANY, Verdict.IGNORED),
        ("--wandb-project", Takes.ONE, Verdict.IGNORED),
        ("--tp-comm-overlap", Takes.NONE, Verdict.IGNORED),
        ("--timing-log-level", Takes.ONE, Verdict.IGNORED),
        ("--img-h", Takes.ONE, Verdict.IGNORED),
        ("--multi-latent-attention", Takes.NONE, Verdict.REFUSED),
        ("--fp8-format", Takes.ONE, Verdict.REFUSED),
        ("--spec", Takes.MANY, Verdict.REFUSED),
        ("--lazy-mpu-init", Takes.OPTIONAL_ONE, Verdict.REFUSED),
        ("--use-megatron-fsdp", Takes.NONE, Verdict.REFUSED),
        ("--calculate-per-token-loss", Takes.NONE, Verdict.REFUSED),
        ("--non-persistent-save-interval", Takes.ONE, Verdict.REFUSED),
    ],
)
def test_known_flag(flag: str, takes: Takes, verdict: Verdict) -> None:
    assert (MEGATRON_FLAGS[flag].takes, MEGATRON_FLAGS[flag].verdict) == (takes, verdict)


@pytest.mark.parametrize("flag", ["--num-layers", "--lr", "--load", "--bf16", "--num-experts", "--mock-data"])
def test_implemented_flag_is_absent(flag: str) -> None:
    assert flag not in MEGATRON_FLAGS
