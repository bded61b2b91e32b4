"""``state_dict()`` and ``named_tensors()`` of an offloaded model: what torch would give."""

from __future__ import annotations

import gc
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from poison import PoisonBackend
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from toys import (
    AwkwardBlock,
    Block,
    OrderedToy,
    Toy,
    assert_restored,
    inputs,
    make_toy,
    same_bits,
    snapshot,
    twin,
)

import dlo_core as dlo
from dlo_core import restore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def awkward() -> Toy:
    torch.manual_seed(0)
    model = Toy([AwkwardBlock(seed=s, large=263_000) for s in range(3)])
    attrgetter("blocks.1.scale")(model).requires_grad_(False)
    return model


def tied_out() -> Toy:
    """A parameter of a block that the outside uses, too, and one that two modules share."""
    model = make_toy(4)
    block: Any = model.blocks[1]
    model.post.weight = block.linear.weight
    block.again = nn.Linear(8, 8)
    block.again.weight = attrgetter("blocks.2.norm.weight")(model)
    inner: Any = model.blocks[3]
    inner.twin = nn.LayerNorm(8)
    inner.twin.weight = inner.norm.weight
    return model


def ordered() -> Toy:
    torch.manual_seed(0)
    return OrderedToy([Block() for _ in range(4)], [2, 0, 3, 1, 2]).requires_grad_(False)


MODELS: dict[str, Callable[[], Toy]] = {
    "toy": make_toy,
    "awkward": awkward,
    "tied": tied_out,
    "ordered": ordered,
}


def world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def everywhere(job: Callable[[int], Any], size: int) -> list[Any]:
    return run_ranks(job, size) if size > 1 else [job(0)]


def assert_as_torch(got: Any, wanted: Any) -> None:
    """Compare two state dicts: order, versions, bits, strides, ties; all on the host."""
    assert type(got) is type(wanted)
    assert list(got) == list(wanted)
    assert got._metadata == wanted._metadata
    mine: dict[int, str] = {}
    theirs: dict[int, str] = {}
    for name, value in wanted.items():
        assert type(got[name]) is type(value), name
        assert got[name].requires_grad == value.requires_grad, name
        assert got[name].device.type == "cpu"
        assert same_bits(got[name], value), name
        assert got[name].stride() == value.stride(), name
        if value.numel():
            first = mine.setdefault(got[name].data_ptr(), name)
            assert first == theirs.setdefault(value.data_ptr(), name), name


@pytest.mark.parametrize("kind", MODELS)
def test_a_state_dict_is_what_torch_would_give(kind: str) -> None:
    """Of the model and of its parts, with a prefix, into a dict of the caller's, as variables."""
    model = MODELS[kind]()
    reference, before = twin(model), snapshot(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    for _ in range(2):
        # A list of blocks asks each by itself, so a tie of resident tensors across two is not seen.
        for path in ("", "blocks.1", *(["blocks"] if kind != "tied" else ["blocks.3"])):
            mine, theirs = model.get_submodule(path), reference.get_submodule(path)
            assert_as_torch(mine.state_dict(), theirs.state_dict())
            assert_as_torch(mine.state_dict(prefix="x."), theirs.state_dict(prefix="x."))
            assert_as_torch(mine.state_dict(keep_vars=True), theirs.state_dict(keep_vars=True))
        start: dict[str, Any] = {"kept": 1}
        assert model.state_dict(destination=start) is start
        assert list(start) == ["kept", *reference.state_dict()]
        with torch.inference_mode():
            state = model.state_dict()
            assert_as_torch(offloaded.state_dict(), reference.state_dict())
            model(inputs())
        assert not any(value.is_inference() for value in state.values())
    offloaded.disable()
    assert_restored(model, before)


def test_a_state_dict_is_a_copy_that_outlives_the_offload() -> None:
    """Writing into it changes nothing; it has its values when the host memory is gone."""
    model = make_toy(3)
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    state = model.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    spoiled = model.state_dict()
    for value in spoiled.values():
        value.zero_()
    assert torch.equal(model(inputs()), reference(inputs()))
    offloaded.shutdown()
    del offloaded
    gc.collect()
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    with pytest.raises(dlo.UseError, match="shut down"):
        model.state_dict()


def test_a_state_dict_that_fails_leaves_the_model_usable() -> None:
    class Broken(Block):
        def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    torch.manual_seed(0)
    model = Toy([Block(), Broken(), Block()]).requires_grad_(False)
    block: Any = model.blocks[1]
    block.extra = nn.Parameter(torch.ones(3), requires_grad=False)
    reference = twin(model)
    dlo.offload(model, device=PoisonBackend(0))
    with pytest.raises(ZeroDivisionError):
        model.state_dict()
    assert torch.equal(model(inputs()), reference(inputs()))


@pytest.mark.parametrize("how", ["inside a block", "while iterating"])
def test_weights_cannot_be_read_while_a_block_computes(how: str) -> None:
    model = make_toy(3)
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    if how == "inside a block":

        def read(*args: Any) -> None:
            with pytest.raises(dlo.UseError, match="busy"):
                model.state_dict()
            with pytest.raises(dlo.UseError, match="busy"):
                offloaded.state_dict()
            with pytest.raises(dlo.UseError, match="busy"):
                next(iter(offloaded.named_tensors()))

        model.blocks[1].register_forward_pre_hook(read)
    else:
        # Off the host nothing is in the way of a forward.
        tensors = iter(offloaded.named_tensors())
        next(tensors)
    assert torch.equal(model(inputs()), reference(inputs()))


# --- spread over ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_all_ranks_read_a_whole_state_dict(kind: str, size: int) -> None:
    """Every rank, or one; before and after a pass; and the next passes are right."""

    def job(rank: int) -> bool:
        model = MODELS[kind]()
        reference, before = twin(model), snapshot(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world())
        wanted = reference.state_dict()
        for turn in range(2):
            assert_as_torch(offloaded.state_dict(), wanted)
            one = offloaded.state_dict(to_rank=size - 1)
            if rank == size - 1:
                assert_as_torch(one, wanted)
            else:
                assert one is None
            with torch.no_grad():
                assert torch.equal(model(inputs(turn + rank)), reference(inputs(turn + rank)))
        named = dict(offloaded.named_tensors())
        assert named.keys() == wanted.keys()
        assert all(same_bits(named[name], wanted[name]) for name in wanted)
        offloaded.disable()
        assert_restored(model, before)
        return True

    assert all(everywhere(job, size))


def test_a_rank_alone_cannot_read_the_others_parts(tmp_path: Path) -> None:
    """The model's own ``state_dict()`` says what to call; with a checkpoint, too."""
    path = tmp_path / "toy.safetensors"
    save_file(make_toy(3).state_dict(), path)

    def job(rank: int) -> bool:
        model = make_toy(3)
        reference = twin(model)
        dlo.offload(model, device=PoisonBackend(0), group=world(), checkpoint=path)
        pipeline = nn.ModuleDict({"dit": model})
        leaf = attrgetter("blocks.1.linear")(model)
        for part in (model, pipeline, model.blocks, model.blocks[2], leaf):
            for keep in (False, True):
                with pytest.raises(dlo.UseError, match=r"LayerwiseOffload\.state_dict\(\)"):
                    part.state_dict(keep_vars=keep)
        assert torch.equal(model.pre.state_dict()["weight"], attrgetter("pre.weight")(reference))
        assert torch.equal(model(inputs(rank)), reference(inputs(rank)))
        return True

    assert all(run_ranks(job, 2))


@pytest.mark.parametrize("where", ["pre", "blocks.2"])
def test_an_iteration_that_one_rank_ends_early_strands_nobody(where: str) -> None:
    """Among the residents or the blocks: closed, the rank serves the others and goes on."""

    def job(rank: int) -> int:
        model = make_toy(5)
        reference = twin(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), timeout_s=20)
        seen = 0
        tensors: Any = offloaded.named_tensors()
        for name, _ in tensors:
            seen += 1
            if rank == 1 and name.startswith(where):
                if where == "blocks.2":
                    with pytest.raises(dlo.UseError, match="busy"):
                        model(inputs())
                    with pytest.raises(dlo.RestoreError, match="busy"):
                        offloaded.disable()
                break
        tensors.close()
        for seed in range(2):
            assert torch.equal(model(inputs(seed + rank)), reference(inputs(seed + rank)))
        offloaded.disable()
        return seen

    whole, part = run_ranks(job, 2)
    assert whole == len(make_toy(5).state_dict())
    assert 0 < part < whole


def test_an_iteration_may_be_closed_after_the_shutdown() -> None:
    def job(rank: int) -> bool:
        offloaded = dlo.offload(make_toy(4), device=PoisonBackend(0), group=world())
        tensors: Any = offloaded.named_tensors()
        assert any(name.startswith("blocks.1") for name, _ in tensors)
        offloaded.shutdown()
        tensors.close()
        return True

    assert all(run_ranks(job, 2))


def test_an_iteration_holds_no_more_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where tensors are made: what is yielded may go before the next block comes."""
    alive = most = 0
    original = restore.tensor_from

    def counted(spec: Any, run: torch.Tensor) -> torch.Tensor:
        nonlocal alive, most
        made = original(spec, run)
        alive += made.nbytes
        most = max(most, alive)

        def gone(nbytes: int = made.nbytes) -> None:
            nonlocal alive
            alive -= nbytes

        import weakref

        weakref.finalize(made, gone)
        return made

    monkeypatch.setattr("dlo_core.readback.tensor_from", counted)
    model = make_toy(6)
    block_nbytes = sum(p.nbytes for p in model.blocks[0].parameters())
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    for _, tensor in offloaded.named_tensors():
        del tensor
    assert block_nbytes <= most <= 2 * block_nbytes


def test_ranks_that_read_differently_are_told() -> None:
    def job(rank: int) -> str:
        model = make_toy(3)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=20)
        with pytest.raises(dlo.AgreementError, match="differ in") as caught:
            offloaded.state_dict(to_rank=rank)
        with pytest.raises(dlo.ConfigError, match="to_rank must be a rank of the group"):
            offloaded.state_dict(to_rank=2)
        # A pass more on one rank.
        if rank == 0:
            with pytest.raises(dlo.ConfigError, match="rank 1"):
                offloaded.state_dict()
        else:
            with pytest.raises(dlo.ConfigError, match="not one of the enabled"):
                offloaded.state_dict(nn.Linear(1, 1))
        assert offloaded.state_dict() is not None
        return str(caught.value)

    assert "to_rank" in run_ranks(job, 2)[0]


def test_several_models_are_told_apart() -> None:
    first, second = make_toy(3), make_toy(2, seed=5)
    wanted = [first.state_dict(), second.state_dict()]
    wanted = [{k: v.clone() for k, v in state.items()} for state in wanted]
    offloaded = dlo.offload([first, second], device=PoisonBackend(0))
    with pytest.raises(dlo.ConfigError, match="model="):
        offloaded.state_dict()
    for model, state in zip((first, second), wanted, strict=True):
        for got in (offloaded.state_dict(model), model.state_dict()):
            assert got is not None
            assert all(torch.equal(got[name], state[name]) for name in state)


def test_names_are_those_of_now() -> None:
    """A wrapped linear has its values under its new name, its adapter's are there, too."""

    class Wrapper(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.a = nn.Linear(8, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Compute the base alone."""
            out: torch.Tensor = self.base(x)
            return out

    model = make_toy(3)
    reference: Any = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    block: Any = model.blocks[1]
    block.linear = Wrapper(block.linear)
    reference.blocks[1].linear = Wrapper(reference.blocks[1].linear)
    reference.blocks[1].linear.a = block.linear.a
    offloaded.refresh()
    wanted = reference.state_dict()
    assert_as_torch(model.state_dict(), wanted)
    named = dict(offloaded.named_tensors())
    assert named.keys() == wanted.keys()
    assert all(same_bits(named[name], wanted[name]) for name in wanted)
