"""Tensors in plain attributes: neither parameter nor buffer, but used in a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from dlo_toy import ToyBackend
from poison import PoisonBackend
from ranks import run_ranks
from test_state import world
from torch import nn
from toys import WIDTH, Toy, assert_restored, inputs, same_bits, snapshot, twin

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Iterator


class Plain(nn.Module):
    """Keeps tensors wherever a module can; ``seen`` has those that its last forward used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.k = torch.rand(WIDTH, generator=gen)
        self.listed = [1, torch.rand(WIDTH, generator=gen)]
        self.keyed: dict[Any, Any] = {
            "a": torch.rand(WIDTH, generator=gen),
            3: {"b": torch.ones(2)},
        }
        self.number = torch.tensor(3)
        self.seen: list[int] = []

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all of them."""
        yield self.k
        yield self.listed[1]  # type: ignore[misc]
        yield self.keyed["a"]
        yield self.keyed[3]["b"]
        yield self.number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use them."""
        self.seen = [tensor.data_ptr() for tensor in self.tensors()]
        k, listed, a, b, number = self.tensors()
        out: torch.Tensor = x + self.linear(x * k + listed) * a * b.sum() + number
        return out


def plain_toy() -> Toy:
    torch.manual_seed(0)
    return Toy([Plain(n) for n in range(4)]).requires_grad_(False)


class Marking(ToyBackend):
    """Tells its own memory from any other."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []

    def empty(self, nbytes: int) -> torch.Tensor:
        """Remember the range."""
        made = super().empty(nbytes)
        self.ranges.append((made.data_ptr(), made.data_ptr() + nbytes))
        return made

    def has(self, address: int) -> bool:
        """Return whether ``address`` is on the device."""
        return any(low <= address < high for low, high in self.ranges)


def assert_given_back(model: Toy, kept: list[list[torch.Tensor]], reference: Any) -> None:
    for block, objects, theirs in zip(model.blocks, kept, reference.blocks, strict=True):
        assert isinstance(block, Plain)
        for mine, before, wanted in zip(block.tensors(), objects, theirs.tensors(), strict=True):
            assert mine is before
            assert same_bits(mine, wanted)


@pytest.mark.parametrize("memory", ["alike", "apart"])
@pytest.mark.parametrize("size", [1, 2])
def test_tensors_in_plain_attributes_are_on_the_device(
    size: int, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By themselves, in a list, in a dict in a dict; the same objects are back afterwards.

    B11, https://github.com/vllm-project/vllm-omni/pull/4278
    """
    if memory == "apart":
        # As where a tensor object of the host cannot be pointed at the device.
        monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda a, b: False)

    def job(rank: int) -> bool:
        model = plain_toy()
        reference, before = twin(model), snapshot(model)
        kept = [list(block.tensors()) for block in model.blocks if isinstance(block, Plain)]
        backend = Marking()
        offloaded = dlo.offload(model, device=backend, group=world())
        assert offloaded.stats().device_bytes == offloaded.footprint.device_nbytes
        for seed in range(3):
            assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
            for block in model.blocks:
                assert isinstance(block, Plain)
                assert all(backend.has(address) for address in block.seen)
        assert not any("k" in name.split(".") for name in offloaded.state_dict() or ())
        offloaded.disable()
        assert_restored(model, before)
        assert_given_back(model, kept, reference)
        model(inputs())
        assert isinstance(model.blocks[0], Plain)
        assert not any(map(backend.has, model.blocks[0].seen))
        return True

    assert all(run_ranks(job, 2)) if size > 1 else job(0)


def test_ranks_may_keep_different_attributes() -> None:
    """They are no weights: a cache that depends on the rank is nobody else's affair."""

    def job(rank: int) -> bool:
        model: Any = plain_toy()
        model.cache = torch.ones(rank + 1)
        reference = twin(model)
        dlo.offload(model, device=Marking(), group=world())
        return torch.equal(model(inputs(rank)), reference(inputs(rank)))

    assert all(run_ranks(job, 2))


def test_where_the_device_is_the_host_nothing_moves() -> None:
    model = plain_toy()
    reference = twin(model)
    kept = [list(block.tensors()) for block in model.blocks if isinstance(block, Plain)]
    dlo.offload(model, device=PoisonBackend(0))
    assert torch.equal(model(inputs()), reference(inputs()))
    assert_given_back(model, kept, reference)


def test_what_cannot_be_moved_is_warned_about_by_its_path() -> None:
    """And an attribute that the forward replaces is left to it."""
    model: Any = plain_toy()
    model.blocks[1].pair = (torch.ones(1), 2)
    model.blocks[2].blank = torch.empty(2, device="meta")
    with torch.inference_mode():
        model.table_of_mine = [torch.ones(3)]
    reference: Any = twin(model)
    with pytest.warns(dlo.DloWarning, match="plain attributes") as caught:
        offloaded = dlo.offload(model, device=Marking())
    told = str(caught[0].message)
    for path in ("'blocks.1.pair[0]' is in a tuple", "'blocks.2.blank' is on the meta"):
        assert path in told
    assert "'table_of_mine[0]' was made under torch.inference_mode()" in told
    assert "register_buffer" in told
    mine = model.blocks[0].k = torch.full((WIDTH,), 2.0)
    reference.blocks[0].k = mine.clone()
    assert torch.equal(model(inputs()), reference(inputs()))
    offloaded.disable()
    assert model.blocks[0].k is mine


def test_an_attribute_that_is_a_resident_tensor_follows_it() -> None:
    """One memory for both, on the device and back."""
    model: Any = plain_toy()
    model.alias = model.post.weight
    model.listed = [model.position]
    backend = Marking()
    offloaded = dlo.offload(model, device=backend)
    assert model.alias.data_ptr() == model.post.weight.data_ptr()
    assert model.listed[0].data_ptr() == model.position.data_ptr()
    assert backend.has(model.alias.data_ptr())
    offloaded.disable()
    assert model.alias is model.post.weight
    assert model.listed[0] is model.position
