"""The life of an offload on an NPU: failed blocks, new weights, two models, a second start."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import ascend_stub
import pytest
import torch
import torch.distributed as dist
from ascend import VENDOR_WARNINGS, build, inputs_of, npu
from ranks import run_ranks
from toys import TOYS, inputs

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from dlo_core.interface import Backend

pytestmark = VENDOR_WARNINGS
SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0}
NUM_BLOCKS = 4


@pytest.fixture
def on_npus(usable_backend: Callable[[str], Backend]) -> Callable[..., list[Any]]:
    """Return what runs a function of a module on ranks with an NPU each."""
    usable_backend("npu:1")
    return partial(run_ranks, start_method=ascend_stub.start_method(), limit_s=55.0)


def same(model: nn.Module, resident: nn.Module, x: torch.Tensor) -> bool:
    with torch.inference_mode():
        return torch.equal(model(x).cpu(), resident(x).cpu())


def fail_and_go_on(model: Any, x: torch.Tensor, number: int) -> None:
    """Raise out of block ``number``."""

    def raise_(*args: Any) -> None:
        raise ArithmeticError("the block says so")

    handle = model.blocks[number].register_forward_pre_hook(raise_)
    with torch.inference_mode(), pytest.raises(ArithmeticError, match="says so"):
        model(x)
    handle.remove()


def live(rank: int, gather: bool) -> dict[str, Any]:
    """Live through everything; tell what was right, and the memory before and after."""
    backend = npu(rank)
    first, second = build(NUM_BLOCKS, "bf16"), build(NUM_BLOCKS, "bf16", seed=1)
    residents = [copy.deepcopy(model).to(backend.device) for model in (first, second)]
    fresh = copy.deepcopy(second.state_dict())
    values = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    x = inputs_of(first, backend.device, rank)
    backend.synchronize()
    before = backend.memory().allocated
    group = dist.group.WORLD if gather else None
    told: dict[str, Any] = {}
    with dlo.offload(first, device=backend, group=group, use_allgather=gather, **SHORT) as made:
        for number in range(NUM_BLOCKS):
            fail_and_go_on(first, x, number)
            told[f"after block {number} failed"] = same(first, residents[0], x)
        made.update_weights(fresh)
        told["new weights"] = same(first, residents[1], x)
        made.update_weights(values)
        told["old weights"] = same(first, residents[0], x)
    told["given back"] = all(
        tensor.device.type == "cpu" and torch.equal(tensor, values[name])
        for name, tensor in first.state_dict().items()
    )
    both = dlo.offload([first, second], device=backend, group=group, use_allgather=gather, **SHORT)
    for _ in range(2):
        told["two models"] = told.get("two models", True) and all(
            same(model, resident, x)
            for model, resident in zip((first, second), residents, strict=True)
        )
    both.shutdown()
    del made, both
    backend.synchronize()
    told["memory"] = backend.memory().allocated == before
    return told


@pytest.mark.parametrize("gather", [False, True], ids=["local", "gather"])
def test_an_offload_lives_through_failures_new_weights_and_a_second_start(
    on_npus: Callable[..., list[Any]], gather: bool
) -> None:
    for told in on_npus(live, 2, gather):
        assert {name for name, right in told.items() if not right} == set()
        assert len(told) == NUM_BLOCKS + 5


def called_inside_another(rank: int) -> list[bool]:
    """Keep all blocks in one run of memory, and call each second one inside of the one before."""
    backend = npu(rank)
    model = TOYS["called inside another"]()
    resident = copy.deepcopy(model).to(backend.device)
    num = len(model.get_submodule("blocks")._modules)
    offloaded = dlo.offload(model, device=backend, packed="auto", resident_layers=num)
    right = [same(model, resident, inputs(number).to(backend.device)) for number in range(3)]
    offloaded.disable()
    return right


def test_blocks_that_stay_may_be_called_inside_of_each_other(
    on_npus: Callable[..., list[Any]],
) -> None:
    """Its operators want storages that are its own, so they share one."""
    assert on_npus(called_inside_another, 1) == [[True] * 3]
