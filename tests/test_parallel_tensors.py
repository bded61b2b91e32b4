"""Parameters that others made parallel: DTensors of TP, and those of fully_shard."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from parallel_dit import (
    NUM_BLOCKS,
    DiTBlock,
    ParallelDiT,
    made_topology,
    make_dit,
    make_latent,
    tp_style,
)
from poison import PoisonBackend
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import WideBlock, inputs, same_bits

import dlo_core as dlo
from dlo_core.recipe import Recipe
from dlo_core.safetensors_header import CheckpointTensor
from dlo_core.slicing import Cut, Slicing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SLOW = pytest.mark.slow
TP_PLAN: dict[str, int | tuple[int, int]] = {
    **{f"blocks.*.{name}.weight": 0 for name in ("q", "k", "v", "up")},
    **{f"blocks.*.{name}.bias": 0 for name in ("q", "k", "v", "up")},
    **{f"blocks.*.{name}.weight": 1 for name in ("proj", "down")},
}


def dim(topology: dlo.Topology, name: str) -> DeviceMesh:
    assert topology.mesh is not None
    return topology.mesh[name]


def live_nbytes() -> int:
    """Return the bytes of all tensors of this process, each storage once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


# --- tensor parallelism -----------------------------------------------------------------------


def test_a_dtensor_comes_back_as_the_object_it_was() -> None:
    """Also twice, and its memory is given up while it streams."""

    def job(rank: int) -> None:
        topo = made_topology(tp=2)
        reference, model = (make_dit(tp=dim(topo, "tp")) for _ in range(2))
        kept = {name: (id(p), type(p), p.stride()) for name, p in model.named_parameters()}
        blocks = sum(
            p.to_local().nbytes for p in model.blocks.parameters() if hasattr(p, "to_local")
        )
        assert blocks > 300_000
        with torch.no_grad():
            want = reference(*make_latent(0))
            for _ in range(2):
                before = live_nbytes()
                offloaded = dlo.offload(model, device="cpu", topology=topo)
                grown = live_nbytes() - before
                footprint = offloaded.footprint
                assert grown <= footprint.host_nbytes + footprint.slots_nbytes - blocks + 10_000
                assert torch.equal(model(*make_latent(0)), want)
                offloaded.disable()
                now = {name: (id(p), type(p), p.stride()) for name, p in model.named_parameters()}
                assert now == kept
                assert torch.equal(model(*make_latent(0)), want)

    run_ranks(job, 2)


def test_a_placeholder_tells_the_truth_about_a_dtensor() -> None:
    def job(rank: int) -> None:
        topo = made_topology(tp=2)
        model = make_dit(tp=dim(topo, "tp"))
        real: Any = model.blocks[1].get_parameter("q.weight")
        facts = (real.shape, real.stride(), real.placements, real.device_mesh, real.dtype)
        offloaded = dlo.offload(model, device="cpu", topology=topo)
        shown: Any = model.blocks[1].get_parameter("q.weight")
        assert shown is not real
        assert (
            shown.shape,
            shown.stride(),
            shown.placements,
            shown.device_mesh,
            shown.dtype,
        ) == facts
        for use in (shown.to_local, shown.full_tensor, shown.sum):
            with pytest.raises(dlo.UseError, match=r"'blocks\.1\.q\.weight' was used"):
                use()
        offloaded.disable(to="meta")
        assert model.blocks[1].get_parameter("q.weight").is_meta

    run_ranks(job, 2)


def test_ranks_of_one_tp_group_never_share_a_shard_group() -> None:
    """A group that was given crosses TP; every rank refuses, and the model is as it was."""

    def job(rank: int) -> str:
        topo = made_topology(tp=2)
        model = make_dit(tp=dim(topo, "tp"))
        with pytest.raises(dlo.ConfigError, match="TP is never dlo's group") as caught:
            dlo.offload(model, device="cpu", group=dist.group.WORLD)
        assert dlo.offloaded(model) is None
        return str(caught.value)

    texts = run_ranks(job, 2)
    assert "[0, 1] of them would share" in texts[0]


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        pytest.param({"dp": 2, "tp": 2}, "names", id="DP2xTP2-names"),
        pytest.param({"tp": 2}, "placements", id="TP2-placements"),
        pytest.param({"dp": 2, "tp": 2}, "placements", id="DP2xTP2-placements", marks=SLOW),
        pytest.param({"tp": 2}, "names", id="TP2-names", marks=SLOW),
    ],
)
def test_a_tp_rank_reads_its_slices_from_a_checkpoint(
    sizes: dict[str, int], plan: str, tmp_path: Path
) -> None:
    """The model is on meta; each rank reads its own part, by names or by its DTensors."""
    path = tmp_path / "model.safetensors"
    save_file(dict(make_dit().state_dict()), path)

    def job(rank: int) -> None:
        topo = made_topology(**sizes)
        reference = make_dit(tp=dim(topo, "tp"))
        with torch.device("meta"):
            model = ParallelDiT(None).requires_grad_(False)
        for block in model.blocks:
            parallelize_module(block, dim(topo, "tp"), tp_style())
        with pytest.raises(dlo.ConfigError, match="would bypass its TP-aware loader"):
            dlo.offload(model, device="cpu", topology=topo, checkpoint=path)
        offloaded = dlo.offload(
            model,
            device=PoisonBackend(),
            topology=topo,
            checkpoint=path,
            tp_plan=TP_PLAN if plan == "names" else "placements",
        )
        assert offloaded.size == sizes.get("dp", 1)
        with torch.no_grad():
            for seed in range(2):
                batch = make_latent(seed)
                assert torch.equal(model(*batch), reference(*batch))
            offloaded.disable()
            assert torch.equal(model(*make_latent(0)), reference(*make_latent(0)))
        for (name, mine), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert type(mine) is type(theirs), name
            assert same_bits(local(mine), local(theirs)), name

    run_ranks(job, 2 * sizes.get("dp", 1))


def local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


class FusedBlock(nn.Module):
    """Query, key and value in one tensor, and TP-local tensors that are no DTensors."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.rand(3 * out, width))
        self.back = nn.Parameter(torch.rand(width, out).t().contiguous().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the three parts."""
        q, k, v = (x @ self.qkv.t()).chunk(3, dim=-1)
        return x + (torch.sigmoid(q * k) * v) @ self.back.t()


class Fused(nn.Module):
    dlo_blocks = ("blocks",)

    def __init__(self, out: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FusedBlock(8, out) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def test_three_parts_in_one_tensor_are_sliced_one_by_one(tmp_path: Path) -> None:
    """Each TP rank gathers its slices over its own DP group: [0, 2] and [1, 3]."""
    path = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    whole = Fused(6).requires_grad_(False)
    save_file({k: v.contiguous() for k, v in whole.state_dict().items()}, path)

    def job(rank: int) -> None:
        topo = made_topology(dp=2, tp=2)
        mine = slice(3 * topo.tp_rank, 3 * topo.tp_rank + 3)
        expected = Fused(3).requires_grad_(False)
        for block, full in zip(expected.blocks, whole.blocks, strict=True):
            rows = full.get_parameter("qkv").view(3, 6, 8)[:, mine]
            block.get_parameter("qkv").copy_(rows.reshape(9, 8))
            columns = full.get_parameter("back")[:, mine]
            block.get_parameter("back").copy_(columns)
        model = Fused(3).requires_grad_(False)
        plan: dict[str, int | tuple[int, int]] = {"*.qkv": (0, 3), "*.back": 1}
        offloaded = dlo.offload(model, device="cpu", topology=topo, checkpoint=path, tp_plan=plan)
        assert torch.equal(model(inputs()), expected(inputs()))
        offloaded.disable()
        for got, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert same_bits(got, theirs)
            assert got.stride() == theirs.stride()
        wrong: list[tuple[str, Any]] = [
            ("which match no tensor", {**plan, "nothing.*": 0}),
            ("cannot cut along dimension 2", {**plan, "*.back": 2}),
            ("into 5 x 2 equal parts", {**plan, "*.qkv": (0, 5)}),
            ("the model wants", {"*.qkv": 1, "*.back": 1}),
            ("must be a dimension", {"*.qkv": -1}),
            ("must be a dimension", {"*.qkv": "rows"}),
            ("must be a mapping", "rows"),
        ]
        for message, bad in wrong:
            with pytest.raises(ValueError, match=message):
                dlo.offload(model, device="cpu", topology=topo, checkpoint=path, tp_plan=bad)
        with pytest.raises(dlo.ConfigError, match="there is no checkpoint="):
            dlo.offload(model, device="cpu", topology=topo, tp_plan=plan)
        assert dlo.offloaded(model) is None
        # Tensors that are TP-local without being DTensors, from the module itself.
        with dlo.offload(model, device=PoisonBackend(), topology=topo) as offloaded:
            assert offloaded.size == 2
            assert torch.equal(model(inputs()), expected(inputs()))

    run_ranks(job, 4)
    with pytest.raises(dlo.ConfigError, match="there is none; pass topology= with tp="):
        Slicing({"*": 0}, rank=0, size=1)


def test_a_cut_is_the_slice_that_torch_makes() -> None:
    """Boxes of the stored tensor along every dimension, in one part and in three."""
    whole = torch.arange(6 * 6 * 6, dtype=torch.int32).view(6, 6, 6)
    stored = CheckpointTensor("whole", Path("none"), torch.int32, (6, 6, 6), 0, whole.nbytes)
    for number in range(3):
        for parts in (1, 3):
            for start, length in ((0, 1), (1, 1), (0, 2)):
                recipe = Cut(number, start, length, parts).apply(Recipe.of(stored))
                pieces = [part.narrow(number, start, length) for part in whole.chunk(parts, number)]
                want = torch.cat(pieces, number)
                assert recipe.shape == tuple(want.shape)
                got = torch.full_like(want, -1)
                for patch in recipe.patches:
                    box = whole.as_strided(patch.shape, patch.stride, patch.start)
                    place = zip(patch.at, patch.shape, strict=True)
                    got[tuple(slice(at, at + many) for at, many in place)] = box
                assert torch.equal(got, want)


def test_a_checkpoint_of_another_shape_is_refused_on_every_tp_rank(tmp_path: Path) -> None:
    """Seven rows are wanted, and eight are there: on rank 0, which has four of either, too."""
    path = tmp_path / "model.safetensors"
    state = dict(Uneven().state_dict())
    state["blocks.1.up.bias"] = torch.zeros(8)
    save_file(state, path)

    def job(rank: int) -> None:
        topo = made_topology(tp=2)
        model = Uneven().requires_grad_(False)
        style: dict[str, Any] = {"up": ColwiseParallel(output_layouts=Replicate())}
        for block in model.blocks:
            parallelize_module(block, dim(topo, "tp"), style)
        message = r"'blocks\.1\.up\.bias' has shape \(8,\).* wants \(7,\)"
        with pytest.raises(dlo.CheckpointError, match=message):
            dlo.offload(model, device="cpu", topology=topo, checkpoint=path, tp_plan="placements")

    run_ranks(job, 2)


def test_uneven_dtensors_stream_too() -> None:
    """Seven rows over two ranks; placements say which rank has four of them."""

    def build(mesh: DeviceMesh) -> Any:
        torch.manual_seed(0)
        model = Uneven().requires_grad_(False)
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
        return model

    def job(rank: int) -> int:
        topo = made_topology(tp=2)
        reference, model = (build(dim(topo, "tp")) for _ in range(2))
        with torch.no_grad(), dlo.offload(model, device="cpu", topology=topo):
            for seed in range(3):
                assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
        return local(model.blocks[0].up.bias).shape[0]

    assert run_ranks(job, 2) == [4, 3]


class Uneven(nn.Module):
    dlo_blocks = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UnevenBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


class UnevenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 7), nn.Linear(7, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus its transform."""
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


# --- fully_shard ------------------------------------------------------------------------------


def run_hsdp(rank: int, prepare: Any, checks: Any = None) -> None:
    """Compare a model that ``prepare`` shards with its like, offloaded; restore, and again."""
    topo = made_topology(hsdp=(1, 2))
    reference, model = (prepare(topo.hsdp_mesh) for _ in range(2))
    with torch.no_grad():
        want = [reference(*make_latent(10 * rank + seed)) for seed in range(2)]
        for _ in range(2):
            offloaded = dlo.offload(
                model, device=PoisonBackend(), topology=topo, use_allgather=False
            )
            for seed in range(2):
                assert torch.equal(model(*make_latent(10 * rank + seed)), want[seed])
            if checks is not None:
                checks(model, offloaded)
            offloaded.disable()
            for part in (*model.modules(), *reference.modules()):
                if isinstance(part, FSDPModule):
                    part.reshard()
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert same_bits(local(mine), local(theirs))
            # FSDP may keep what it gathers here; it is freed when the model is offloaded again.
            assert torch.equal(model(*make_latent(10 * rank)), want[0])


def sharded(model: ParallelDiT, mesh: DeviceMesh | None, **kwargs: Any) -> Any:
    """Shard every block, and then the model."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def sharded_blocks(model: ParallelDiT, mesh: DeviceMesh | None) -> Any:
    """Shard every block, each of which then is a root of its own to FSDP."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return model


@pytest.mark.parametrize(
    "shard",
    [
        pytest.param(sharded, id="as-usual"),
        pytest.param(sharded_blocks, id="blocks-only", marks=SLOW),
        pytest.param(partial(sharded, reshard_after_forward=False), id="kept", marks=SLOW),
        pytest.param(
            partial(sharded, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
            id="mixed-precision",
            marks=SLOW,
        ),
    ],
)
def test_blocks_of_fully_shard_stream_their_shards(shard: Any) -> None:
    """However FSDP is set, the shard is on the device only while its block runs."""

    def check(model: Any, offloaded: dlo.LayerwiseOffload) -> None:
        weight = model.blocks[2].q.weight
        assert weight.shape == (64, 64)
        for use in (weight.to_local, weight.full_tensor):
            with pytest.raises(dlo.UseError, match=r"'blocks\.2\.q\.weight' was used"):
                # Some torch gives the placeholder itself, which raises as soon as it is used.
                use().clone()
        with pytest.raises(dlo.UseError, match=r"'blocks\.2\."):
            model.blocks[2].unshard()

    def job(rank: int) -> None:
        run_hsdp(rank, lambda mesh: shard(make_dit(), mesh), check)

    run_ranks(job, 2)


def test_a_unit_inside_of_a_block_is_streamed_and_uneven_shards_are_padded() -> None:
    """FSDP pads seven rows over two ranks to eight."""

    def prepare(mesh: DeviceMesh) -> Any:
        torch.manual_seed(0)
        model = OddDiT().requires_grad_(False)
        for block in model.blocks:
            fully_shard(block.get_submodule("inner"), mesh=mesh)
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def job(rank: int) -> None:
        run_hsdp(rank, prepare)

    run_ranks(job, 2)


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = UnevenBlock()
        self.scale = nn.Parameter(torch.rand(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale and run the inner part."""
        out: torch.Tensor = self.inner(x * self.scale.sum(0))
        return out


class OddDiT(nn.Module):
    dlo_blocks = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(3))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot go on after an error"
)
def test_a_model_that_ran_before_can_be_offloaded_and_fails_in_a_block_without_harm() -> None:
    """FSDP keeps the root's weights gathered between forwards; dlo leaves them alone."""

    def job(rank: int) -> None:
        topo = made_topology(hsdp=(2, 1))
        reference, model = (sharded(make_dit(), topo.hsdp_mesh) for _ in range(2))
        with torch.no_grad():
            want = reference(*make_latent(0))
            assert torch.equal(model(*make_latent(0)), want)
            offloaded = dlo.offload(model, device="cpu", topology=topo, use_allgather=False)
            before = live_nbytes()
            handle = model.blocks[2].norm1.register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                model(*make_latent(0))
            handle.remove()
            # FSDP's own way back after an error in a forward.
            model.reset_iter_state()
            assert torch.equal(model(*make_latent(0)), want)
            assert live_nbytes() <= before + 100_000
        with torch.enable_grad(), pytest.raises(dlo.UseError, match="have no gradients"):
            model.requires_grad_(True)(*make_latent(0))
        offloaded.shutdown()

    run_ranks(job, 2)


def fail(module: nn.Module, args: Any) -> None:
    raise RuntimeError("on purpose")


def test_what_fully_shard_manages_and_cannot_stream_is_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(dict(make_dit().state_dict()), path)

    def root_only(mesh: DeviceMesh) -> Any:
        return fully_shard(make_dit(), mesh=mesh)

    def pairs(mesh: DeviceMesh) -> Any:
        model = make_dit()
        fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh)
        return sharded_rest(model, mesh)

    def sharded_rest(model: Any, mesh: DeviceMesh) -> Any:
        for block in model.blocks[2:]:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def ahead(mesh: DeviceMesh) -> Any:
        model = sharded(make_dit(), mesh)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
        return model

    def on_meta(mesh: DeviceMesh) -> Any:
        with torch.device("meta"):
            return sharded(ParallelDiT(None), mesh)

    def job(rank: int) -> None:
        topo = made_topology(hsdp=(1, 2))
        mesh = topo.hsdp_mesh
        assert mesh is not None
        policy = CPUOffloadPolicy(pin_memory=False)
        cases: list[tuple[str, Any, dict[str, Any]]] = [
            ("apply fully_shard.. to every block", root_only(mesh), {}),
            ("apply fully_shard.. to every block", pairs(mesh), {}),
            ("gathers others ahead", ahead(mesh), {}),
            ("has no values", on_meta(mesh), {}),
            ("CPUOffloadPolicy", sharded(make_dit(), mesh, offload_policy=policy), {}),
            ("bypass the loader", sharded(make_dit(), mesh), {"checkpoint": path}),
            ("a second time", sharded(make_dit(), mesh), {"group": dist.group.WORLD}),
        ]
        for message, model, settings in cases:
            if "group" not in settings:
                settings |= {"topology": topo, "use_allgather": False}
            with pytest.raises(dlo.ConfigError, match=message):
                dlo.offload(model, device="cpu", **settings)
            assert dlo.offloaded(model) is None

    run_ranks(job, 2)


def test_the_gather_of_fully_shard_is_issued_where_the_slot_was_waited_for() -> None:
    """Before FSDP's own hook, which gathers on a stream that does not wait for the slot."""
    seen: list[tuple[bool, ...]] = []

    def look(module: Any, args: Any) -> None:
        seen.append(tuple(hasattr(p, "to_local") for p in module.parameters()))

    def job(rank: int) -> None:
        topo = made_topology(hsdp=(1, 2))
        model = sharded(make_dit(), topo.hsdp_mesh)
        for block in model.blocks:
            block.register_forward_pre_hook(look, prepend=True)
        with dlo.offload(model, device="cpu", topology=topo, use_allgather=False):
            model(*make_latent(0))
            assert len(seen) == NUM_BLOCKS
            assert not any(any(managed) for managed in seen)
            # Freed after the block, so that the parameters are the sharded ones again.
            look(model.blocks[0], ())
            assert all(seen[-1])

    run_ranks(job, 2)


def test_without_values_a_managed_model_says_so() -> None:
    def job(rank: int) -> None:
        topo = made_topology(hsdp=(1, 2))
        model = sharded(make_dit(), topo.hsdp_mesh)
        settings: dict[str, Any] = {"topology": topo, "use_allgather": False}
        offloaded = dlo.offload(model, device="cpu", **settings)
        weight: Any = model.blocks[0].get_parameter("q.weight")
        assert "Placeholder('blocks.0.q.weight'" in repr(weight)
        offloaded.disable(to="meta")
        with pytest.raises(dlo.UseError, match="was disabled"):
            weight.to_local()
        with pytest.raises(dlo.ConfigError, match="has no values, for they were released"):
            dlo.offload(model, device="cpu", **settings)

    run_ranks(job, 2)


def test_the_class_that_a_model_declares_is_found_under_fully_shard() -> None:
    """fully_shard gives a module a class of its own, which no declaration names."""

    class Declared(ParallelDiT):
        dlo_blocks = None  # type: ignore[assignment]
        _repeated_blocks = ("DiTBlock",)

    def job(rank: int) -> int:
        mesh = made_topology(hsdp=(1, 2)).hsdp_mesh
        torch.manual_seed(0)
        model = sharded(Declared(None).requires_grad_(False), mesh)
        assert type(model.blocks[0]).__name__ != DiTBlock.__name__
        with dlo.offload(model, device="cpu", use_allgather=False) as offloaded:
            return len(offloaded.blocks)

    assert run_ranks(job, 2) == [NUM_BLOCKS] * 2


def test_wide_blocks_are_cut_too() -> None:
    """A remainder of DTensors and plain tensors, with gather over the DP group."""

    def job(rank: int) -> None:
        topo = made_topology(dp=2, tp=2)
        mesh = dim(topo, "tp")

        def build() -> Any:
            torch.manual_seed(0)
            model = Wide().requires_grad_(False)
            style = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in (model.first, *model.blocks):
                parallelize_module(block, mesh, style)
            return model

        reference, model = build(), build()
        with torch.no_grad(), dlo.offload(model, device=PoisonBackend(), topology=topo):
            for seed in range(3):
                assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
        with torch.no_grad():
            assert torch.equal(model(inputs()), reference(inputs()))

    run_ranks(job, 4)


class Wide(nn.Module):
    dlo_blocks = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.first = WideBlock()
        self.blocks = nn.ModuleList(WideBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all blocks."""
        for block in (self.first, *self.blocks):
            x = block(x)
        return x


# --- values that are spread over ranks ---------------------------------------------------------


def uses_of_values(model: Any, offloaded: dlo.LayerwiseOffload, path: Path) -> list[Any]:
    """Return every call that reads or writes whole tensors."""
    whole = make_dit().state_dict()
    return [
        lambda: offloaded.save(path),
        offloaded.state_dict,
        lambda: offloaded.state_dict(to_rank=0),
        lambda: list(offloaded.named_tensors()),
        lambda: offloaded.update_weights(whole),
        lambda: offloaded.update_weights(iter(whole.items())),
        lambda: offloaded.load_state_dict(whole),
        lambda: model.load_state_dict(whole),
        lambda: model.load_state_dict(whole, strict=False),
        model.state_dict,
        model.blocks[1].state_dict,
        model.blocks[1].q.state_dict,
    ]


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=SLOW), {"hsdp": (1, 2)}, {"hsdp": (2, 1)}],
)
def test_a_part_is_never_taken_for_the_whole_tensor(sizes: dict[str, Any], tmp_path: Path) -> None:
    """Whatever reads or writes values refuses on every rank, and nothing is changed."""

    def job(rank: int) -> None:
        topo = made_topology(**sizes)
        if topo.hsdp_mesh is None:
            reference, model = (make_dit(tp=dim(topo, "tp")) for _ in range(2))
        else:
            reference, model = (sharded(make_dit(), topo.hsdp_mesh) for _ in range(2))
        offloaded = dlo.offload(
            model, device="cpu", topology=topo, use_allgather=topo.hsdp_mesh is None
        )
        with torch.no_grad():
            want = reference(*make_latent(0))
            for use in uses_of_values(model, offloaded, tmp_path / "saved"):
                with pytest.raises(dlo.UseError, match="of which each rank has a part"):
                    use()
                assert torch.equal(model(*make_latent(0)), want)
        offloaded.disable()
        assert torch.equal(model(*make_latent(0)), want)

    run_ranks(job, 4 if "dp" in sizes else 2)
    assert list(tmp_path.iterdir()) == []


def test_a_dtensor_that_is_whole_on_every_rank_is_read_and_written() -> None:
    """In a block and outside of the blocks; what is read is plain."""

    def build(mesh: DeviceMesh, seed: int) -> Any:
        torch.manual_seed(seed)
        model = Uneven().requires_grad_(False)
        for module in (model, *model.blocks):
            module.register_parameter("scale", nn.Parameter(torch.rand(3), requires_grad=False))
            values = DTensor.from_local(module.get_parameter("scale"), mesh, [Replicate()])
            module.scale = nn.Parameter(values, requires_grad=False)
        return model

    def job(rank: int) -> None:
        mesh = dim(made_topology(tp=2), "tp")
        model, new = build(mesh, 0), build(mesh, 1)
        offloaded = dlo.offload(model, device="cpu", group=dist.group.WORLD)
        state = {name: local(tensor).clone() for name, tensor in new.state_dict().items()}
        offloaded.update_weights(state)
        for values in (dict(offloaded.named_tensors()), offloaded.state_dict()):
            assert values is not None
            assert {"scale", "blocks.1.scale"} <= set(values)
            assert all(same_bits(local(values[name]), value) for name, value in state.items())
        assert all(not hasattr(v, "to_local") for _, v in offloaded.named_tensors())
        offloaded.disable()
        assert all(same_bits(local(v), state[name]) for name, v in model.state_dict().items())

    run_ranks(job, 2)
