"""Real diffusers transformers: their blocks are found and they run bit for bit when offloaded."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from toys import assert_restored, snapshot

import dlo_core as dlo
from dlo_core.discovery import find_blocks

diffusers = pytest.importorskip("diffusers")

from diffusers_zoo import ZOO, Order, build, cast_, forward, make_inputs, stacked_blocks  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

pytestmark = [
    # diffusers' own, about names that its classes use themselves.
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    # torch's, about Mochi's autocast to float32 and the mixed dtypes of Kandinsky5.
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
]

NUM_FORWARDS = 3
PLAIN = sorted(family for family, entry in ZOO.items() if not entry.reads_outside)
READS_OUTSIDE = sorted(set(ZOO) - set(PLAIN))
# One of each kind: sequential, conditional, experts by data, interleaved, reordered, several
# layouts, mixed dtypes, repeated.
CHOSEN = ["flux", "flux3", "hidream", "latte", "lumina2", "sd35", "wan", "wan_animate"]

# Where the found lists are not the zoo's stacks. diffusers declares the token refiner of
# HunyuanVideo as one block, which is in no list; the faces of WanAnimate not at all; and all modes
# of Flux3, whose image_cond the zoo's inputs do not use.
_REFINER = "context_embedder.token_refiner.refiner_blocks"
NOT_FOUND = {
    "hunyuan_video": {_REFINER},
    "hunyuan_video15": {_REFINER},
    "wan_animate": {"motion_encoder.res_blocks", "face_adapter"},
}
FOUND_TOO = {"flux3": {"mode_blocks.image_cond"}}


def all_inputs(family: str, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    return [make_inputs(family, seed, dtype=dtype) for seed in range(NUM_FORWARDS)]


def assert_same(
    model: nn.Module, batches: Sequence[dict[str, Any]], want: Sequence[list[torch.Tensor]]
) -> None:
    """Run the batches and compare every output bit for bit."""
    for number, (kwargs, outputs) in enumerate(zip(batches, want, strict=True)):
        got = forward(model, kwargs)
        assert len(got) == len(outputs) > 0
        for ours, theirs in zip(got, outputs, strict=True):
            assert theirs.isfinite().all()
            assert torch.equal(ours, theirs), f"forward {number} differs"


def check_family(
    family: str, dtype: torch.dtype = torch.float32, **settings: Any
) -> dlo.LayerwiseOffload:
    """Compare resident and offloaded forwards, then what ``disable()`` gives back."""
    model = build(family, dtype=dtype)
    batches = all_inputs(family, dtype)
    want = [forward(model, kwargs) for kwargs in batches]
    before = snapshot(model)
    offloaded = dlo.offload(model, device="cpu", **settings)
    assert_same(model, batches, want)
    offloaded.disable()
    assert_restored(model, before)
    assert_same(model, batches[:1], want[:1])
    return offloaded


def containers(model: nn.Module) -> set[str]:
    return {block.name.rpartition(".")[0] for block in find_blocks(model)}


def found_share(model: nn.Module) -> float:
    in_blocks = {id(p): p for block in find_blocks(model) for p in block.module.parameters()}
    total = sum(p.numel() for p in model.parameters())
    return sum(p.numel() for p in in_blocks.values()) / total


# --- discovery --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(ZOO))
def test_the_stacks_are_found(family: str) -> None:
    model = build(family)
    expected = set(ZOO[family].stacks) - NOT_FOUND.get(family, set())
    assert containers(model) == expected | FOUND_TOO.get(family, set())


@pytest.mark.parametrize("family", sorted(ZOO))
def test_the_stacks_can_be_declared_in_run_order(family: str) -> None:
    model = build(family)
    found = find_blocks(model, ZOO[family].stacks)
    assert [(block.name, block.module) for block in found] == stacked_blocks(family, model)


def transformer_classes() -> dict[str, type[nn.Module]]:
    """Return all transformer classes of diffusers, by name."""
    package = importlib.import_module("diffusers.models.transformers")
    found: dict[str, type[nn.Module]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name, kind in vars(module).items():
            own = inspect.isclass(kind) and kind.__module__ == module.__name__
            if own and issubclass(kind, diffusers.ModelMixin):
                found.setdefault(name, cast("type[nn.Module]", kind))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nine_tenths_of_every_class_at_full_size_are_found() -> None:
    """On meta, with default settings; a few classes have none, and cannot be built."""
    shares: dict[str, float] = {}
    for name, kind in transformer_classes().items():
        try:
            with torch.device("meta"):
                model = kind()
        except (TypeError, ValueError):
            continue
        shares[name] = found_share(model)
    assert len(shares) > 55
    assert {name: share for name, share in shares.items() if share < 0.9} == {}


# --- one rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PLAIN)
def test_offloaded_is_bit_identical_and_disable_gives_the_same_parameters_back(family: str) -> None:
    check_family(family)


@pytest.mark.parametrize("family", CHOSEN)
def test_blocks_declared_in_run_order_are_bit_identical(family: str) -> None:
    check_family(family, blocks=ZOO[family].stacks, depth=3)


@pytest.mark.parametrize("family", ["flux3", "kandinsky5", "skyreels_v2", "wan"])
def test_blocks_of_mixed_dtypes_are_bit_identical(family: str) -> None:
    """These keep some parameters in float32 when the rest is bfloat16."""
    dtypes = {p.dtype for p in build(family, dtype=torch.bfloat16).parameters()}
    assert dtypes == {torch.float32, torch.bfloat16}
    check_family(family, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", PLAIN)
def test_every_family_in_every_depth_and_dtype(family: str, dtype: torch.dtype, depth: int) -> None:
    check_family(family, dtype, depth=depth)
    check_family(family, dtype, depth=depth, blocks=ZOO[family].stacks)


@pytest.mark.parametrize("family", READS_OUTSIDE)
def test_a_weight_that_is_read_outside_its_block_raises_and_may_stay_resident(family: str) -> None:
    """DiT's output layer calls the embedding of block 0."""
    model = build(family)
    before = snapshot(model)
    kwargs = make_inputs(family)
    (part,) = ZOO[family].reads_outside
    offloaded = dlo.offload(model, device="cpu")
    with pytest.raises(dlo.UseError, match=rf"'{part}\..*resident=\('{part}"):
        forward(model, kwargs)
    offloaded.disable()
    assert_restored(model, before)
    check_family(family, resident=ZOO[family].reads_outside)


def test_a_stack_that_some_inputs_skip_runs_when_it_is_asked_for() -> None:
    """SD3 skips layers by an argument: the prefetched block is not the one that runs."""
    model = build("sd3")
    kwargs = make_inputs("sd3")
    skips = [[], [1], [0, 2], [], [0], [1]]
    batches = [kwargs | {"skip_layers": skip} for skip in skips]
    want = [forward(model, batch) for batch in batches]
    with dlo.offload(model, device="cpu"):
        assert_same(model, batches, want)


# --- checkpoints ------------------------------------------------------------------------------


def save_sharded(model: Any, folder: Path) -> None:
    """Write several shards and an index, as diffusers does."""
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def build_on_meta(family: str, dtype: torch.dtype) -> Any:
    """Return the model as accelerate.init_empty_weights() gives it, with its buffers real."""
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        model = getattr(diffusers, ZOO[family].class_name)(**ZOO[family].config)
    cast_(model, dtype)
    return model.eval().requires_grad_(False)


def check_checkpoint(family: str, dtype: torch.dtype, folder: Path) -> None:
    """Compare a resident model with one on meta that is filled from its checkpoint."""
    resident = build(family, dtype=dtype)
    batches = all_inputs(family, dtype)
    want = [forward(resident, kwargs) for kwargs in batches]
    save_sharded(resident, folder)
    model = build_on_meta(family, dtype)
    keep = ZOO[family].reads_outside
    offloaded = dlo.offload(model, device="cpu", checkpoint=folder, resident=keep)
    assert_same(model, batches, want)
    offloaded.disable()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, resident.get_parameter(name))
    assert_same(model, batches, want)


@pytest.mark.parametrize("family", CHOSEN)
def test_a_model_on_meta_is_filled_from_a_sharded_checkpoint(family: str, tmp_path: Path) -> None:
    check_checkpoint(family, torch.bfloat16, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(ZOO))
def test_every_family_is_filled_from_a_sharded_checkpoint(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    check_checkpoint(family, dtype, tmp_path)


# --- several ranks ----------------------------------------------------------------------------


def run_family(family: str, rank: int) -> list[str]:
    """Compare with a resident run of this rank's own batches; return what differs."""
    model = build(family)
    seeds = range(10 * rank, 10 * rank + NUM_FORWARDS)
    batches = [make_inputs(family, seed) for seed in seeds]
    want = [forward(model, kwargs) for kwargs in batches]
    before = snapshot(model)
    offloaded = dlo.offload(
        model,
        device="cpu",
        group=dist.group.WORLD,
        resident=ZOO[family].reads_outside,
        timeout_s=20.0,
        load_timeout_s=20.0,
    )
    assert_same(model, batches, want)
    offloaded.disable()
    assert_restored(model, before)
    return list(offloaded.config.resident)


def run_families(rank: int, families: Sequence[str]) -> None:
    for family in families:
        try:
            run_family(family, rank)
        except Exception as error:
            raise AssertionError(f"{family}: {error!r}") from error


def test_two_ranks_that_gather_are_bit_identical() -> None:
    """Each rank has batches of its own."""
    run_ranks(run_families, 2, CHOSEN)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3])
def test_every_family_gathers_bit_identically(size: int) -> None:
    run_ranks(run_families, size, sorted(ZOO), limit_s=280.0)


def test_the_zoo_has_every_kind_of_order() -> None:
    assert {entry.order for entry in ZOO.values()} == set(Order)
    assert any(entry.reordered for entry in ZOO.values())
