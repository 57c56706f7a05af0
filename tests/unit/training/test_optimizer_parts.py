"""One optimizer's state becomes two's and back: rates, steps and identities follow, tensors stay in their places."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.training.optimizer_parts import fit_parts


def group(*, expert: bool, wd_mult: float = 1.0, lr: float = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "is_expert_parallel": expert,
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "lr": lr,
        **more,
    }


def distributed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"optimizer": {"param_groups": list(groups)}, "grad_scaler": {"scale": 8.0}, **more}


def test_equal_numbers_of_parts_pass_unchanged() -> None:
    one = distributed(group(expert=False), param_state={0: "tensor"})
    assert fit_parts(one, one) == one
    two = {0: one, 1: one}
    assert fit_parts(two, two) == two


def test_two_parts_become_one_with_the_dense_groups_and_all_tensors() -> None:
    loaded = {
        0: distributed(group(expert=False), group(expert=False, wd_mult=0.0)),
        1: distributed(group(expert=True, lr=0.25)),
        "param_state": {0: "dense", 1: "expert"},
    }
    wanted = distributed(group(expert=False, lr=9.0), group(expert=False, wd_mult=0.0, lr=9.0), param_state=None)
    fitted = fit_parts(loaded, wanted)
    assert fitted["param_state"] == {0: "dense", 1: "expert"}
    assert [g["lr"] for g in fitted["optimizer"]["param_groups"]] == [0.5, 0.5]
    assert fitted["grad_scaler"] == {"scale": 8.0}


def test_one_part_becomes_two_and_experts_take_the_rates_of_all() -> None:
    loaded: dict[Any, Any] = {
        **distributed(group(expert=False)),
        0: {"param_state": "dense"},
        1: {"param_state": "expert"},
    }
    wanted = {
        0: distributed(group(expert=False, lr=9.0), param_state=None),
        1: distributed(group(expert=True, lr=9.0), param_state=None),
    }
    fitted = fit_parts(loaded, wanted)
    assert [fitted[part]["param_state"] for part in (0, 1)] == ["dense", "expert"]
    (expert,) = fitted[1]["optimizer"]["param_groups"]
    assert expert["is_expert_parallel"] is True
    assert expert["lr"] == 0.5


def test_a_plain_optimizer_keeps_its_local_parameters_and_the_common_step() -> None:
    saved = {"state": {"common_step": 7}, "param_groups": [group(expert=False)]}
    loaded = {
        0: saved,
        1: {"state": {"common_step": 7}, "param_groups": [group(expert=True)]},
        "state": {0: "tensors", 1: "tensors"},
        "param_groups": [{"params": [0, 1]}],
    }
    wanted = {"state": {}, "param_groups": [group(expert=False, lr=9.0)]}
    fitted = fit_parts(loaded, wanted)
    assert fitted["state"] == {0: "tensors", 1: "tensors", "common_step": 7}
    assert fitted["param_groups"][0]["params"] == [0, 1]
    assert fitted["param_groups"][0]["lr"] == 0.5


def test_a_group_without_counterpart_is_refused() -> None:
    loaded = {0: distributed(group(expert=False)), 1: distributed(group(expert=True))}
    with pytest.raises(ValueError, match=r"no parameter group with .*'wd_mult': 3"):
        fit_parts(loaded, distributed(group(expert=False, wd_mult=3.0)))
