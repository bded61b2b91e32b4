"""``update_weights()``: the bits of a model that was loaded with the new weights, or the old."""

from __future__ import annotations

import re
import weakref
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kernels import Program
from poison import PoisonBackend
from ranks import run_ranks
from safetensors.torch import save_file
from test_state import MODELS, everywhere, world
from torch import nn
from toys import (
    WIDTH,
    Block,
    Toy,
    assert_restored,
    inputs,
    make_toy,
    same_bits,
    snapshot,
    twin,
)

import dlo_core as dlo
from dlo_core.host import HostStore
from dlo_core.testing import GlooAgreement, SimBackend, World
from dlo_core.testing.compute import Compute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

State = dict[str, torch.Tensor]
KINDS: dict[str, Callable[[], Toy]] = {**MODELS, "two blocks": lambda: make_toy(2)}


def change(model: nn.Module) -> nn.Module:
    """Give every tensor that a state dict has other values, in place."""
    values = [v for v in model.state_dict().values() if isinstance(v, torch.Tensor)]
    kept = {tensor.data_ptr(): tensor for tensor in values}
    with torch.no_grad():
        for tensor in kept.values():
            if tensor.dtype == torch.bool:
                tensor.logical_not_()
            elif tensor.dtype.is_floating_point:
                tensor.copy_((tensor.float() * 0.7 + 0.25).to(tensor.dtype))
            elif tensor.numel():
                tensor.copy_((tensor.to(torch.complex64) + 1).to(tensor.dtype))
    return model


def assert_like(model: nn.Module, reference: nn.Module, rank: int = 0) -> None:
    with torch.no_grad():
        for seed in range(3):
            assert torch.equal(model(inputs(seed + rank)), reference(inputs(seed + rank)))


WAYS: dict[str, Callable[[State], Any]] = {
    "a dict": lambda state: state,
    "a list": lambda state: list(state.items()),
    "an iterator": lambda state: iter(state.items()),
    "backwards": lambda state: reversed(list(state.items())),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_a_model_with_the_new_weights(kind: str, size: int) -> None:
    """However they are given; before a pass, after one; and ``disable()`` gives them back."""

    def job(rank: int) -> bool:
        model = KINDS[kind]()
        old = twin(model)
        new = change(twin(model))
        states = [new.state_dict(), old.state_dict()]
        objects = {name: id(tensor) for name, tensor in model.named_parameters()}
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world())
        for turn, way in enumerate(WAYS):
            assert offloaded.update_weights(WAYS[way](states[turn % 2])) == ()
            assert_like(model, (new, old)[turn % 2], rank)
        offloaded.update_weights(states[0])
        got = offloaded.state_dict()
        assert got is not None
        assert all(same_bits(got[name], value) for name, value in states[0].items())
        offloaded.disable()
        assert {name: id(tensor) for name, tensor in model.named_parameters()} == objects
        assert all(same_bits(model.state_dict()[name], v) for name, v in states[0].items())
        return True

    assert all(everywhere(job, size))


@pytest.mark.parametrize("size", [1, 2])
def test_after_an_update_a_checkpoint_is_no_longer_the_truth(size: int, tmp_path: Path) -> None:
    """``disable()`` gives back what was updated, of a model that was on meta."""
    path = tmp_path / "toy.safetensors"
    save_file(make_toy(4).state_dict(), path)

    def job(rank: int) -> bool:
        model = make_toy(4)
        new = change(twin(model))
        position = model.position
        model.to("meta").position = position
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), checkpoint=path)
        offloaded.update_weights(new.state_dict())
        assert_like(model, new, rank)
        offloaded.disable()
        wanted = new.state_dict()
        assert all(same_bits(value, wanted[name]) for name, value in model.state_dict().items())
        return True

    assert all(everywhere(job, size))


@pytest.mark.parametrize("use_allgather", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_an_adapter_is_merged_and_taken_out_again(size: int, use_allgather: bool) -> None:
    """Some tensors by name, and the exact base back; ranks that keep all need no other rank.

    B22, https://github.com/huggingface/diffusers/pull/11804
    """

    def job(rank: int) -> bool:
        model = make_toy(4)
        reference, before = twin(model), snapshot(model)
        merged = twin(model)
        offloaded = dlo.offload(
            model, device=PoisonBackend(0), group=world(), use_allgather=use_allgather
        )
        gen = torch.Generator().manual_seed(3)
        names = [f"blocks.{n}.linear.weight" for n in (0, 2)] + ["pre.weight"]
        state = reference.state_dict()
        base = {name: state[name] for name in names}
        fused = {
            name: value
            + torch.randn(WIDTH, 2, generator=gen) @ torch.randn(2, WIDTH, generator=gen)
            for name, value in base.items()
        }
        merged.load_state_dict(state | fused)
        for _ in range(2):
            if use_allgather or rank == 0:
                offloaded.update_weights(fused)
                assert_like(model, merged, rank)
                offloaded.update_weights(base)
            assert_like(model, reference, rank)
        offloaded.disable()
        assert_restored(model, before)
        return True

    assert all(everywhere(job, size))


def test_an_adapter_that_was_added_is_updated_by_its_new_names() -> None:
    """B22, https://github.com/huggingface/diffusers/pull/11804"""

    class Lora(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.a = nn.Linear(WIDTH, 2, bias=False)
            self.b = nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Add the low-rank part."""
            out: torch.Tensor = self.base(x) + self.b(self.a(x))
            return out

    model: Any = make_toy(3)
    reference: Any = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    torch.manual_seed(1)
    for each in (model, reference):
        torch.manual_seed(1)
        each.blocks[1].linear = Lora(each.blocks[1].linear).requires_grad_(False)
    offloaded.refresh()
    assert_like(model, reference)
    change(reference)
    offloaded.update_weights(reference.state_dict())
    assert_like(model, reference)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_are_changed_block_by_block_while_they_are_read(size: int) -> None:
    """Reading and writing in one go, a block in memory at a time; twice, with passes between."""

    def job(rank: int) -> bool:
        model = MODELS["ordered"]()
        reference = twin(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world())
        for _ in range(2):
            offloaded.update_weights(
                (name, tensor * 0.5 + 1) for name, tensor in offloaded.named_tensors()
            )
            with torch.no_grad():
                for tensor in reference.state_dict().values():
                    tensor.mul_(0.5).add_(1)
            assert_like(model, reference, rank)
        return True

    assert all(everywhere(job, size))


def test_an_iterator_is_never_held_whole() -> None:
    alive = most = 0

    def one(value: torch.Tensor) -> torch.Tensor:
        nonlocal alive, most
        made = value.clone()
        alive += 1
        most = max(most, alive)

        def gone() -> None:
            nonlocal alive
            alive -= 1

        weakref.finalize(made, gone)
        return made

    model = make_toy(5)
    new = change(twin(model))
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    offloaded.update_weights((name, one(value)) for name, value in new.state_dict().items())
    assert 1 <= most <= 2
    assert alive <= 1
    assert_like(model, new)


@pytest.mark.parametrize("size", [1, 3])
def test_a_rank_writes_its_own_bytes_and_no_others(size: int) -> None:
    def job(rank: int) -> int:
        model = make_toy(4)
        new = change(twin(model))
        written = 0
        write = HostStore.write

        def count(self: HostStore, index: int, start: int, data: torch.Tensor) -> None:
            nonlocal written
            written += data.numel()
            write(self, index, start, data)

        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostStore, "write", count)
            offloaded.update_weights(new.state_dict())
        assert_like(model, new, rank)
        return written

    assert sum(everywhere(job, size)) == sum(p.nbytes for p in make_toy(4).blocks.parameters())


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [(), ("stream 0",), ("stream 0", "compute")])
@pytest.mark.parametrize("size", [1, 2])
def test_a_forward_that_the_device_has_not_come_to_has_the_old_weights(
    size: int, early: tuple[str, ...]
) -> None:
    """The host is ahead: copies and kernels of the last forward are queued when it updates.

    B29, https://github.com/pytorch/pytorch/issues/127612
    """

    def job(rank: int) -> bool:
        backend = SimBackend(World(early=early), host_ahead=True)
        model = Program(5)
        old: Any = twin(model)
        new: Any = change(twin(model))
        group = GlooAgreement(backend) if dist.is_initialized() else None
        offloaded = dlo.offload(model, device=backend, group=group)
        states = [new.state_dict(), old.state_dict()]
        expected = old
        for turn in range(4):
            with Compute(backend):
                out = model(inputs(rank))
            offloaded.update_weights(states[turn % 2])
            backend.synchronize()
            assert torch.equal(out, expected(inputs(rank)))
            expected = (new, old)[turn % 2]
        with backend.compute():
            out = model(inputs(rank))
        assert torch.equal(out, expected(inputs(rank)))
        return True

    assert all(everywhere(job, size))


def test_an_update_in_the_middle_of_a_pass_is_refused() -> None:
    """From inside a block; then the pass and the next update are right."""
    model = make_toy(3)
    new = change(twin(model)).state_dict()
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))

    def update(*args: Any) -> None:
        with pytest.raises(dlo.UseError, match="busy"):
            offloaded.update_weights(new)

    handle = model.blocks[1].register_forward_pre_hook(update)
    assert_like(model, reference)
    handle.remove()
    offloaded.update_weights(new)
    reference.load_state_dict(new)
    assert_like(model, reference)


def test_an_update_ends_the_pass_of_an_engine_that_calls_blocks() -> None:
    def job(rank: int) -> bool:
        model = make_toy(4)
        new = change(twin(model))
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), timeout_s=20)
        x = inputs(rank)
        wanted: Any = new
        for block in list(model.blocks)[: 4 - rank]:
            block(x)
        offloaded.update_weights(new.state_dict())
        for mine, theirs in zip(model.blocks, wanted.blocks, strict=True):
            assert torch.equal(mine(x), theirs(x))
        offloaded.disable()
        return True

    assert all(run_ranks(job, 2))


def test_of_several_models_one_is_updated() -> None:
    def job(rank: int) -> bool:
        first, second = make_toy(3), make_toy(2, seed=5)
        old, old_second, new = twin(first), twin(second), change(twin(second))
        offloaded = dlo.offload([first, second], device=PoisonBackend(0), group=world())
        second(inputs(rank))
        first(inputs(rank))
        with pytest.raises(dlo.ConfigError, match="model="):
            offloaded.update_weights(new.state_dict())
        offloaded.update_weights(new.state_dict(), model=second)
        for _ in range(2):
            assert_like(first, old, rank)
            assert_like(second, new, rank)
        second.load_state_dict(old_second.state_dict())
        assert_like(second, old_second, rank)
        return True

    assert job(0)
    assert all(run_ranks(job, 2))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_an_update_works_in_every_grad_mode(mode: Any) -> None:
    """And with values that were made there, that require gradients, or are strided."""
    model = make_toy(3)
    new = change(twin(model))
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    with mode():
        values = {name: value * 1.0 for name, value in new.state_dict().items()}
        values["pre.weight"] = values["pre.weight"].t().contiguous().t()
        if mode is torch.enable_grad:
            values["post.weight"].requires_grad_(True)
        offloaded.update_weights(values)
    assert_like(model, new)
    offloaded.disable()
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())


# --- refusals -------------------------------------------------------------------------------------


def bad_values() -> dict[str, tuple[Any, str]]:
    good = torch.zeros(WIDTH, WIDTH)
    name = "blocks.1.linear.weight"
    return {
        "unknown": (("blocks.9.linear.weight", good), r"'blocks\.9\.linear\.weight' is no tensor"),
        "shape": ((name, good[:2]), r"float32 of shape \(2, 8\), the model has float32 of shape"),
        "dtype": ((name, good.half()), r"float16 of shape \(8, 8\), the model has float32"),
        "resident dtype": (("post.weight", good.double()), r"'post\.weight' was given float64"),
        "meta": ((name, good.to("meta")), "is on meta"),
        "sparse": ((name, good.to_sparse()), "layout"),
        "no tensor": ((name, [0.0]), "plain tensor with its full shape; got a builtins.list"),
        "no name": ((3, good), "got 3 as a name"),
        "no pair": (name, "pairs of a name and a tensor"),
    }


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("given", ["whole", "an iterator"])
def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(
    given: str, size: int
) -> None:
    """Given as a whole, though it comes last; by an iterator, when it comes first."""

    def job(rank: int) -> bool:
        model = make_toy(3)
        reference, before = twin(model), snapshot(model)
        new = list(change(twin(model)).state_dict().items())
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=20)
        for name, (bad, told) in bad_values().items():
            pairs = [bad] if rank == 0 else []
            values = iter(pairs) if given == "an iterator" else [*(new if pairs else []), *pairs]
            with pytest.raises(dlo.ConfigError, match=told):
                offloaded.update_weights(values)
            assert_like(model, reference, rank)
            assert name
        offloaded.disable()
        assert_restored(model, before)
        return True

    assert all(everywhere(job, size))


def test_a_placeholder_is_no_value() -> None:
    model = make_toy(3)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    with pytest.raises(dlo.ConfigError, match=r"got a dlo_core\.binding\.Placeholder"):
        offloaded.update_weights(dict(model.named_parameters()))


def test_unknown_names_are_skipped_where_it_is_allowed() -> None:
    model = make_toy(3)
    new = change(twin(model))
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    given = {"ema.decay": torch.ones(1), **new.state_dict()}
    with pytest.raises(dlo.ConfigError, match=r"'ema\.decay' is no tensor"):
        offloaded.update_weights(given)
    assert offloaded.update_weights(given, strict=False) == ("ema.decay",)
    assert_like(model, new)


@pytest.mark.parametrize("given", ["whole", "an iterator"])
def test_tied_names_with_different_values_are_refused(given: str) -> None:
    model = MODELS["tied"]()
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    for first, second in (
        ("blocks.3.norm.weight", "blocks.3.twin.weight"),
        ("blocks.1.linear.weight", "post.weight"),
    ):
        shape = attrgetter(first)(reference).shape
        values = {first: torch.zeros(shape), second: torch.ones(shape)}
        with pytest.raises(dlo.ConfigError, match=f"'{re.escape(second)}' is tied to"):
            offloaded.update_weights(values if given == "whole" else iter(values.items()))
        if given == "an iterator":
            offloaded.update_weights({first: attrgetter(first)(reference)})
        assert_like(model, reference)


def test_host_memory_that_cannot_be_written_is_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_toy(3)
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    new = change(twin(reference)).state_dict()
    reason = "they are pages of the checkpoint; use host='pageable'"
    monkeypatch.setattr(HostStore, "why_read_only", property(lambda self: reason))
    with pytest.raises(dlo.UseError, match="use host='pageable'"):
        offloaded.update_weights(new)
    assert_like(model, reference)


# --- half-way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", ["dtype", "user", "interrupt"])
def test_an_update_that_fails_half_way_is_closed_until_it_is_repaired(how: str, size: int) -> None:
    """Every use says so, on every rank; an update that covers it brings the new or the old."""
    raised = {"dtype": dlo.ConfigError, "user": ZeroDivisionError, "interrupt": KeyboardInterrupt}

    def job(rank: int) -> bool:
        model = make_toy(4)
        new = change(twin(model))
        state = new.state_dict()
        wanted = twin(new)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=20)

        def values() -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, value) in enumerate(state.items()):
                if number == len(state) // 2 and rank == 0:
                    if how == "dtype":
                        yield name, value.double()
                    raise ZeroDivisionError if how == "user" else KeyboardInterrupt
                yield name, value

        expected: type[BaseException] = raised[how]
        if rank and how != "dtype":
            expected = dlo.AgreementError
        with pytest.raises(expected):
            offloaded.update_weights(values())
        uses: list[Callable[[], Any]] = [
            lambda: model(inputs()),
            lambda: model.blocks[3](inputs()),
            model.state_dict,
            lambda: list(offloaded.named_tensors()),
            offloaded.refresh,
        ]
        for use in uses:
            with pytest.raises(dlo.UseError, match=r"update_weights\(\) failed half-way"):
                use()
        with pytest.raises(dlo.RestoreError, match=r"update_weights\(\) failed half-way"):
            offloaded.disable()
        # Not all of it: still torn.
        with pytest.raises(dlo.UseError, match="failed half-way"):
            offloaded.update_weights({"table": state["table"]})
        offloaded.update_weights(state)
        assert_like(model, wanted, rank)
        offloaded.disable()
        assert_like(model, wanted, rank)
        return True

    assert all(everywhere(job, size))


def test_half_updated_weights_can_be_let_go() -> None:
    model = make_toy(3)
    state = change(twin(model)).state_dict()
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    pairs = [("table", state["table"]), ("nothing", state["table"])]
    with pytest.raises(dlo.ConfigError):
        offloaded.update_weights(iter(pairs))
    offloaded.disable(to="meta")
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("given", ["whole", "an iterator"])
def test_ranks_that_are_given_other_values_are_told(given: str) -> None:
    """As a whole before anything is changed; by an iterator it is closed until it is repaired."""

    def job(rank: int) -> str:
        model = make_toy(3)
        reference = twin(model)
        state = change(twin(model)).state_dict()
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=20)
        values = dict(state)
        if rank == 1:
            values["blocks.1.linear.bias"] = values["blocks.1.linear.bias"] + 1e-7
        with pytest.raises(dlo.AgreementError, match=r"blocks\.1\.linear\.bias") as caught:
            offloaded.update_weights(values if given == "whole" else iter(values.items()))
        if given == "whole":
            assert_like(model, reference, rank)
        else:
            with pytest.raises(dlo.UseError, match="half-way"):
                model(inputs())
            offloaded.update_weights(reference.state_dict())
            assert_like(model, reference, rank)
        # Different tensors on different ranks, and a whole against an iterator.
        with pytest.raises(dlo.AgreementError, match="differ in"):
            offloaded.update_weights({("pre.bias", "post.bias")[rank]: torch.zeros(WIDTH)})
        with pytest.raises(dlo.AgreementError, match="given as"):
            offloaded.update_weights({} if rank else iter(()))
        assert_like(model, reference, rank)
        return str(caught.value)

    first, second = run_ranks(job, 2)
    assert first == second


# --- load_state_dict ------------------------------------------------------------------------------


class Counting(Block):
    """A block with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> Any:
        """Return the count."""
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        """Take the count."""
        self.count = state["count"]


@pytest.mark.parametrize("size", [1, 2])
def test_load_state_dict_loads_all_or_nothing(size: int) -> None:
    def job(rank: int) -> bool:
        torch.manual_seed(0)
        model = Toy([Counting() for _ in range(3)]).requires_grad_(False)
        reference = twin(model)
        new: Any = change(twin(model))
        new.blocks[1].count = 7
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=20)
        state = new.state_dict()
        short = {name: value for name, value in state.items() if name != "blocks.1.norm.bias"}
        bad: list[tuple[Any, str]] = [
            (short, r"'blocks\.1\.norm\.bias' missing"),
            (state | {"more": torch.ones(1)}, "'more' is no tensor"),
            (state | {"table": torch.ones(1)}, "'table' was given"),
            (list(state.items()), "mapping"),
        ]
        for values, told in bad:
            with pytest.raises(dlo.ConfigError, match=told):
                model.load_state_dict(values)
            assert_like(model, reference, rank)
        missing, unexpected = model.load_state_dict(short | {"more": torch.ones(1)}, strict=False)
        assert (missing, unexpected) == (["blocks.1.norm.bias"], ["more"])
        assert attrgetter("blocks.1.count")(model) == 7
        result = model.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert_like(model, new, rank)
        offloaded.disable()
        assert_like(model, new, rank)
        return True

    assert all(everywhere(job, size))


class Picky(Counting):
    """A block that refuses a count below zero."""

    def set_extra_state(self, state: Any) -> None:
        """Take the count."""
        if state["count"] < 0:
            raise ZeroDivisionError("a count below zero")
        self.count = state["count"]


class Stuck(dict[str, Any]):
    """A mapping that cannot be gone through."""

    def items(self) -> Any:
        """Raise."""
        raise ZeroDivisionError("no items")


def test_state_that_one_rank_cannot_take_is_an_error_on_all() -> None:
    """The module's own code fails last, when the others would go on and wait in the next pass."""

    def job(rank: int) -> str:
        torch.manual_seed(0)
        model = Toy([Picky() for _ in range(3)]).requires_grad_(False)
        state = model.state_dict()
        name = "blocks.1._extra_state"
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=10)
        with pytest.raises(ZeroDivisionError if rank else dlo.AgreementError) as caught:
            model.load_state_dict({**state, name: {"count": -rank}})
        with pytest.raises(ZeroDivisionError if rank else dlo.AgreementError):
            model.load_state_dict(Stuck(state) if rank else state)
        lost = {**state, "blocks.9._extra_state": {"count": 1}}
        with pytest.raises(dlo.ConfigError, match="is for no module"):
            model.load_state_dict(lost)
        assert model.load_state_dict(lost, strict=False).unexpected_keys == [
            "blocks.9._extra_state"
        ]
        model(inputs())
        offloaded.disable()
        return str(caught.value)

    assert "ZeroDivisionError: a count below zero" in run_ranks(job, 2)[0]
