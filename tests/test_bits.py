"""Bits: an offloaded model computes what its resident twin does, bit for bit."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from toys import (
    AwkwardBlock,
    Block,
    Toy,
    WideBlock,
    assert_restored,
    inputs,
    make_toy,
    same_bits,
    snapshot,
    twin,
)

import dlo_core as dlo
from dlo_core.cpu import CpuBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

NUM_FORWARDS = 3
# Longer than a cell takes; far shorter than a rank may wait for one that failed.
SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0}


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One combination.

    Attributes:
        ranks: Ranks in the group.
        num_blocks: Blocks of the model.
        depth: Slots.
        path: How the bytes travel: ``staged`` and ``in place`` gather, ``local`` does not.
        dtypes: ``fp32``, ``bf16`` or ``mixed``.
    """

    ranks: int
    num_blocks: int
    depth: int
    path: str
    dtypes: str

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks, depth {self.depth}, {self.ranks} ranks, {self.path}, "
            f"{self.dtypes}"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Those of ``offload()``."""
        stages = 0 if self.path == "in place" else 2
        return {"use_allgather": self.path != "local", "depth": self.depth, "stages": stages}

    def pairs(self) -> frozenset[tuple[str, Any, str, Any]]:
        """Return every pair of values of two axes."""
        axes = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return frozenset((*a, *b) for a, b in itertools.combinations(axes, 2))


AXES: tuple[tuple[Any, ...], ...] = (
    (1, 2, 3, 4),
    (1, 2, 3, 4, 5, 7, 12),
    (2, 3, 4),
    ("staged", "in place", "local"),
    ("fp32", "bf16", "mixed"),
)
PRODUCT = tuple(itertools.starmap(Cell, itertools.product(*AXES)))


def pairwise(cells: tuple[Cell, ...]) -> Iterator[Cell]:
    """Yield a few of the cells that have every pair of values which the cells have."""
    pairs = {cell: cell.pairs() for cell in cells}
    missing = set().union(*pairs.values())
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))
        missing -= pairs[best]
        yield best


def third(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Return a third of the cells that has every three values of them: the fourth follows."""

    def place(cell: Cell) -> int:
        values = [getattr(cell, field.name) for field in fields(cell)]
        return sum(axis.index(value) for axis, value in zip(AXES, values, strict=True))

    return tuple(cell for cell in cells if place(cell) % 3 == 0)


def threes(cells: Iterable[Cell]) -> set[tuple[Any, ...]]:
    """Return every three values of the cells' axes but the ranks."""
    values = [tuple(getattr(cell, field.name) for field in fields(cell))[1:] for cell in cells]
    return {three for one in values for three in itertools.combinations(enumerate(one), 3)}


FEW = tuple(pairwise(PRODUCT))


def build(cell: Cell) -> Toy:
    """Return the model of a cell: seeded, frozen, every block different."""
    if cell.dtypes != "mixed":
        dtype = torch.bfloat16 if cell.dtypes == "bf16" else torch.float32
        return make_toy(cell.num_blocks, dtype=dtype)
    torch.manual_seed(cell.num_blocks)
    blocks: list[nn.Module] = [
        (AwkwardBlock(seed=number), WideBlock(), Block())[number % 3]
        for number in range(cell.num_blocks)
    ]
    model = Toy(blocks)
    if cell.num_blocks >= 3:
        # Tied with the outside.
        last = model.get_submodule("blocks.2.norm")
        assert isinstance(last, nn.LayerNorm)
        last.bias = model.table
    return model.requires_grad_(False).eval()


def differences(rank: int, cell: Cell) -> list[str]:
    """Run one cell on this rank and return what is wrong with it."""
    model = build(cell)
    resident, before = twin(model), snapshot(model)
    dtype = torch.bfloat16 if cell.dtypes == "bf16" else torch.float32
    found = []
    offloaded = dlo.offload(
        model, device=CpuBackend(), group=dist.group.WORLD, **cell.settings, **SHORT
    )
    with torch.inference_mode():
        for number in range(NUM_FORWARDS):
            x = inputs(100 * rank + number, dtype)
            if not torch.equal(model(x), resident(x)):
                found.append(f"{cell}: rank {rank}: forward {number} differs")
    offloaded.disable()
    try:
        assert_restored(model, before)
    except AssertionError as error:
        found.append(f"{cell}: rank {rank}: not restored: {error}")
    return found


def run_cells(rank: int, cells: list[Cell]) -> list[str]:
    """Run many cells in one process; a difference does not end it, an exception does."""
    found = []
    for cell in cells:
        try:
            found += differences(rank, cell)
        except Exception as error:
            raise AssertionError(f"{cell}: {error}") from error
    return found


def test_the_few_cells_hold_every_pair_of_values() -> None:
    assert {pair for cell in FEW for pair in cell.pairs()} == {
        pair for cell in PRODUCT for pair in cell.pairs()
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_offloaded_model_computes_the_same_bits(ranks: int) -> None:
    cells = [cell for cell in FEW if cell.ranks == ranks]
    assert cells
    assert [*itertools.chain(*run_ranks(run_cells, ranks, cells))] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bits_are_the_same_in_the_full_product(ranks: int) -> None:
    cells = [cell for cell in PRODUCT if cell.ranks == ranks]
    found = run_ranks(run_cells, ranks, cells, limit_s=380.0)
    assert [*itertools.chain(*found)] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_bits_are_the_same_in_all_threes_of_values(ranks: int) -> None:
    cells = [cell for cell in PRODUCT if cell.ranks == ranks]
    few = [*third(cells)]
    assert threes(few) == threes(cells)
    found = run_ranks(run_cells, ranks, few, limit_s=380.0)
    assert [*itertools.chain(*found)] == []


def flip_one_bit(rank: int, cell: Cell) -> list[str]:
    model = build(cell)
    resident = twin(model)
    offloaded = dlo.offload(
        model, device=CpuBackend(), group=dist.group.WORLD, **cell.settings, **SHORT
    )
    engine = offloaded.engine
    assert engine is not None
    if rank == 1:
        # Not of the first two blocks, whose copies were queued at enable.
        engine.store.shard(2)[2] ^= 0x40
    with torch.inference_mode():
        equal = [torch.equal(model(inputs(n)), resident(inputs(n))) for n in range(2)]
    offloaded.shutdown()
    return [str(value) for value in equal]


def test_one_flipped_bit_in_one_shard_is_seen_by_every_rank() -> None:
    """Prove that the comparison of these tests can fail."""
    cell = Cell(ranks=2, num_blocks=3, depth=2, path="staged", dtypes="fp32")
    assert run_ranks(flip_one_bit, 2, cell) == [["False", "False"]] * 2


# --- from checkpoints -----------------------------------------------------------------------------

FORMS = ("file", "folder", "index")


def write_checkpoint(model: nn.Module, folder: Path, form: str) -> Path:
    """Write ``model`` in one of the three forms and return the path to give to ``offload()``."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # safetensors keeps one name of a tie.
        if id(tensor) not in seen:
            tensors[name] = tensor.detach().contiguous()
        seen.add(id(tensor))
    folder.mkdir()
    if form == "file":
        save_file(tensors, folder / "weights.safetensors")
        return folder / "weights.safetensors"
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    # Alternately, so that every block has tensors in both files.
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, (key, tensor) in enumerate(tensors.items()):
        parts[number % 2][key] = tensor
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    if form == "folder":
        return folder
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def with_parameters_on_meta(model: Toy) -> Toy:
    """Return a twin as ``init_empty_weights`` makes it: parameters on meta, buffers real."""
    made = twin(model)
    assert isinstance(made, Toy)
    blank: dict[nn.Parameter, nn.Parameter] = {}
    for module in made.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in blank:
                    values = torch.empty_strided(
                        parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
                    )
                    blank[parameter] = nn.Parameter(values, requires_grad=False)
                module._parameters[key] = blank[parameter]
    return made


def scrambled(model: Toy) -> Toy:
    """Return a twin with values that are all wrong, where the checkpoint has some."""
    made = twin(model)
    assert isinstance(made, Toy)
    kept = made.state_dict()
    with torch.no_grad():
        for tensor in kept.values():
            tensor.zero_()
    return made


def on_meta(model: nn.Module) -> list[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in tensors if tensor.is_meta]


def load_and_compare(
    rank: int, paths: dict[str, Path], resident: Toy, *, gathers: bool, empty: bool
) -> None:
    model = with_parameters_on_meta(resident) if empty else scrambled(resident)
    for form, path in paths.items():
        where = f"{form}, gathers={gathers}, meta={empty}"
        offloaded = dlo.offload(
            model,
            device=CpuBackend(),
            group=dist.group.WORLD,
            checkpoint=path,
            use_allgather=gathers,
            **SHORT,
        )
        assert on_meta(model) == [], where
        # A world of one with sharding on is a plain local path.
        assert offloaded.engine is not None
        size = dist.get_world_size()
        assert offloaded.engine.transfer.gathers == (gathers and size > 1), where
        with torch.inference_mode():
            for number in range(NUM_FORWARDS):
                x = inputs(100 * rank + number)
                assert torch.equal(model(x), resident(x)), f"{where}: forward {number}"
        offloaded.disable()
        assert on_meta(model) == [], where
        got, want = model.state_dict(), resident.state_dict()
        assert [key for key in want if not same_bits(got[key], want[key])] == [], where
        model = with_parameters_on_meta(resident) if empty else scrambled(resident)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_checkpoint_of_any_form_gives_the_same_bits(ranks: int, tmp_path: Path) -> None:
    resident = build(Cell(ranks=ranks, num_blocks=4, depth=2, path="staged", dtypes="mixed"))
    paths = {form: write_checkpoint(resident, tmp_path / form, form) for form in FORMS}

    def body(rank: int) -> None:
        for gathers, empty in itertools.product((True, False), repeat=2):
            load_and_compare(rank, paths, resident, gathers=gathers, empty=empty)

    run_ranks(body, ranks)


@pytest.mark.parametrize("gathers", [True, False])
def test_parameters_on_meta_take_the_dtype_on_disk(gathers: bool, tmp_path: Path) -> None:
    resident = make_toy(3, dtype=torch.bfloat16)
    path = write_checkpoint(resident, tmp_path / "stored", "file")
    model = with_parameters_on_meta(make_toy(3))
    # Buffers are real, and as the checkpoint has them.
    model.position = model.position.bfloat16()

    def body(rank: int) -> None:
        offloaded = dlo.offload(
            model,
            device=CpuBackend(),
            group=dist.group.WORLD,
            checkpoint=path,
            use_allgather=gathers,
            **SHORT,
        )
        assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
        x = inputs(rank, torch.bfloat16)
        with torch.inference_mode():
            assert torch.equal(model(x), resident(x))
        offloaded.disable()
        assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}

    run_ranks(body, 2)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_parameter_with_values_of_another_dtype_is_an_error(
    gathers: bool, tmp_path: Path
) -> None:
    path = write_checkpoint(make_toy(3, dtype=torch.bfloat16), tmp_path / "stored", "file")

    def body(rank: int) -> str:
        model = make_toy(3)
        before = snapshot(model)
        with pytest.raises(dlo.CheckpointError) as caught:
            dlo.offload(
                model,
                device=CpuBackend(),
                group=dist.group.WORLD,
                checkpoint=path,
                use_allgather=gathers,
                **SHORT,
            )
        assert_restored(model, before)
        return str(caught.value)

    for text in run_ranks(body, 2):
        assert "pre.weight" in text
        assert "torch.bfloat16" in text
        assert "torch.float32" in text
