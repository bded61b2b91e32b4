"""Every cell of the matrix of parallelisms, end to end, against the same topology without offload.

Each test writes what it measured into the JUnit report, from which ``tools/parallel_table.py``
makes the table in docs/parallelism.md.
"""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from collective_log import CollectiveLog, LoggedBackend
from parallel_cells import CELLS, Cell, cell_id
from parallel_dit import NUM_BLOCKS, made_topology, make_dit, make_latent
from ranks import run_ranks
from toys import same_bits

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.topology import Topology

NUM_FORWARDS = 3
ACCEPTED = [cell for cell in CELLS if cell.shares]
REJECTED = [cell for cell in CELLS if not cell.shares]


def params(cells: list[Cell]) -> list[Any]:
    """Return the cells for pytest; all but the quick ones are slow."""
    return [
        pytest.param(cell, id=cell_id(cell), marks=() if cell.quick else pytest.mark.slow)
        for cell in cells
    ]


def topology_of(cell: Cell) -> Topology:
    dp, sp, tp, replicas, shards = cell.sizes
    return made_topology(dp=dp, sp=sp, tp=tp, hsdp=(replicas, shards))


def build(topology: Topology) -> Any:
    """Return the model of this rank."""
    sizes, mesh = topology.sizes, topology.mesh
    assert mesh is not None
    tp = mesh["tp"] if sizes.tp > 1 else None
    sp = topology.sp if sizes.sp > 1 else None
    return make_dit(sp, tp, topology.hsdp_mesh)


def batches(topology: Topology, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's inputs: its own, but for ranks that share a sequence."""
    sizes = topology.sizes
    request = rank // (sizes.sp * sizes.tp)
    return [make_latent(100 * request + number) for number in range(NUM_FORWARDS)]


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Return what this rank holds of every parameter."""
    held = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        held[name] = local.detach().clone()
    return held


def measured(offloaded: dlo.LayerwiseOffload, backend: LoggedBackend, before: int) -> Any:
    """Return host and device bytes, predicted from layouts and counted by the allocators."""
    footprint = offloaded.footprint
    return {
        "host": (footprint.host_nbytes, backend.watched.held_nbytes),
        "device": (footprint.device_nbytes, backend.memory().allocated - before),
        "blocks": footprint.blocks_nbytes,
    }


def run_cell(rank: int, cell: Cell) -> Any:
    """Compare, and return the bytes and the log of collectives."""
    topology = topology_of(cell)
    reference, model = build(topology), build(topology)
    inputs = batches(topology, rank)
    log, own = CollectiveLog(), CollectiveLog()
    with torch.no_grad():
        with own:
            want = [reference(*batch) for batch in inputs]
        backend = LoggedBackend(log)
        # What earlier tests left to the collector, and the fork inherited, is not to go meanwhile.
        gc.collect()
        before = backend.memory().allocated
        offloaded = dlo.offload(
            model, device=backend, topology=topology, use_allgather=cell.use_allgather, timeout_s=20
        )
        assert offloaded.size == cell.shares
        assert len(offloaded.blocks) == NUM_BLOCKS
        with log:
            for number, batch in enumerate(inputs):
                assert torch.equal(model(*batch), want[number]), f"forward {number} differs"
        # Of the model's own collectives none is disturbed: the same ones in the same order.
        assert [entry for entry in log.entries if entry[0] == "model"] == own.entries
        found = measured(offloaded, backend, before)
        gathered = offloaded.stats().gathered_bytes
        offloaded.disable()
        held, mine = weights_of(reference), weights_of(model)
        assert held.keys() == mine.keys()
        assert all(same_bits(mine[name], held[name]) for name in held)
        assert torch.equal(model(*inputs[0]), want[0])
    assert bool(gathered) == (cell.shares > 1)
    return found, log.entries


@pytest.mark.parametrize("cell", params(ACCEPTED))
@pytest.mark.timeout(120)
def test_an_accepted_cell_is_bit_identical_and_as_large_as_predicted(
    cell: Cell, record_property: Callable[[str, object], None]
) -> None:
    """Output, weights given back, bytes, and one order of collectives on every rank."""
    results = run_ranks(run_cell, cell.world, cell, limit_s=100)
    first, entries = results[0]
    for found, order in results:
        for kind in ("host", "device"):
            predicted, counted = found[kind]
            assert abs(counted - predicted) <= 0.01 * predicted, kind
        # Each rank keeps its part of the blocks, and what equal, aligned parts cost.
        assert found["host"][1] <= 1.01 * found["blocks"] / cell.shares + 512 * NUM_BLOCKS
        assert order == entries
    assert {whose for whose, _, _ in entries} == whose_collectives(cell)
    record_property("cell", json.dumps(record_of(cell, first)))


def whose_collectives(cell: Cell) -> set[str]:
    """Return who issues collectives in a forward: the model, and dlo where weights are shared."""
    _, sp, tp, replicas, shards = cell.sizes
    own = {"model"} if sp > 1 or tp > 1 or replicas * shards > 1 else set()
    return own | ({"dlo", "control"} if cell.shares > 1 else set())


def record_of(cell: Cell, found: Any) -> dict[str, Any]:
    """Return what the table shows."""
    return {
        "name": cell.name,
        "use_allgather": cell.use_allgather,
        "ranks": cell.world,
        "shares": cell.shares,
        "rejected": cell.rejected,
        "found": found,
    }


def attempt(rank: int, cell: Cell) -> tuple[str, bool]:
    """Try a rejected cell; return the message and whether the model was left alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dp, _, tp, replicas, shards = cell.sizes
    if replicas * shards > 1 and (dp > 1 or tp > 1):
        # What from_sizes() would not even make, somebody else may have made.
        outer = ("dp" if dp > 1 else "tp", "shard")
        mesh = init_device_mesh("cpu", (max(dp, tp), shards), mesh_dim_names=outer)
        dist.barrier()
        model = make_dit()
        kept = weights_of(model)
        with pytest.raises(dlo.ConfigError) as caught:
            dlo.Topology.from_mesh(mesh, hsdp="shard", **{outer[0]: outer[0]})
    else:
        topology = topology_of(cell)
        model = build(topology)
        kept = weights_of(model)
        with pytest.raises(dlo.ConfigError) as caught:
            dlo.offload(model, device="cpu", topology=topology, use_allgather=cell.use_allgather)
    now = weights_of(model)
    untouched = dlo.offloaded(model) is None and all(same_bits(now[n], kept[n]) for n in kept)
    return str(caught.value), untouched


@pytest.mark.parametrize("cell", params(REJECTED))
@pytest.mark.timeout(120)
def test_a_rejected_cell_says_why_on_every_rank_and_touches_nothing(
    cell: Cell, record_property: Callable[[str, object], None]
) -> None:
    world = max(cell.world, cell.sizes[0] * cell.sizes[2] * cell.sizes[4])
    answers = run_ranks(attempt, world, cell, limit_s=60)
    for message, untouched in answers:
        assert cell.rejected in message
        assert untouched
    assert len({message for message, _ in answers}) == 1
    record_property("cell", json.dumps(record_of(cell, None)))


def test_the_next_block_is_gathered_while_this_one_exchanges_tokens() -> None:
    """The gather of a later block is issued before the all-to-alls of this one, on every rank.

    B40, https://github.com/NVIDIA/nccl/issues/592
    """
    (cell,) = (c for c in CELLS if c.name == "SP2" and c.use_allgather)
    entries = run_ranks(run_cell, 2, cell, limit_s=50)[0][1]
    kinds = [name for whose, name, _ in entries if whose != "control"]
    # The last forward, in which the ring order is known; each block has three and one of them.
    assert set(kinds) == {"all_gather", "alltoall_base_"}
    assert kinds.count("alltoall_base_") == NUM_FORWARDS * NUM_BLOCKS * 4
    last = kinds[len(kinds) - 5 * NUM_BLOCKS :]
    assert last[:10] == 2 * ["all_gather", *4 * ["alltoall_base_"]]


@pytest.mark.slow
def test_the_model_of_these_tests_really_is_parallel() -> None:
    """Ulysses and TP compute what one rank computes, but for rounding."""

    def job(rank: int) -> Any:
        topology = made_topology(sp=2, tp=2)
        with torch.no_grad():
            return build(topology)(*make_latent(0)).numpy()

    parts = [torch.from_numpy(part) for part in run_ranks(job, 4)]
    with torch.no_grad():
        whole = make_dit()(*make_latent(0))
    assert torch.equal(parts[0], parts[1])
    assert torch.allclose(torch.cat([parts[0], parts[2]], dim=1), whole, atol=1e-5)
