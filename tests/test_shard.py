"""The shard: every byte of a block on exactly one rank, and the gathered shards are the block."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlo_core.cpu import CpuBackend
from dlo_core.layout import align_up
from dlo_core.shard import TRAILER_NBYTES, ShardPlan, trailer
from dlo_core.slots import Slot
from dlo_core.travelling import BlockTimes, TravellingBlock, expected_trailers
from dlo_core.unpack import RawUnpack

DIGEST = hashlib.sha256(b"layouts").digest()
BLOCK = 5
bounded = settings(deadline=None, derandomize=True, max_examples=200, database=None)
sizes = st.integers(1, 64)
alignments = st.sampled_from((64, 256, 512))
# Blocks far smaller than the group, and some that fill the slices to the last byte.
runs = st.one_of(
    st.integers(0, 300), st.integers(0, 40_000), st.integers(0, 160).map((256).__mul__)
)


def random_run(nbytes: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=gen)


def shards_of(run: torch.Tensor, plan: ShardPlan) -> list[torch.Tensor]:
    """Return what every rank keeps, padding as 0xAA, as the loader would leave it."""
    made = []
    for rank in range(plan.size):
        shard = torch.full((plan.nbytes,), 0xAA, dtype=torch.uint8)
        for piece in plan.pieces(rank):
            shard[piece.at : piece.at + piece.stop - piece.start] = run[piece.start : piece.stop]
        if plan.size > 1:
            end = bytearray(trailer(DIGEST, BLOCK, rank))
            shard[-TRAILER_NBYTES:] = torch.frombuffer(end, dtype=torch.uint8)
        made.append(shard)
    return made


def gather(plan: ShardPlan, shards: list[torch.Tensor], slack: int = 0) -> Slot:
    """Return a slot that received ``shards`` and was unpacked."""
    backend = CpuBackend()
    buffer = torch.cat([*shards, torch.full((slack,), 0xEE, dtype=torch.uint8)])
    event = backend.new_event()
    slot = Slot(0, buffer, event, event, event, event, backend.new_check())
    expected = expected_trailers(DIGEST, BLOCK, plan.size) if plan.size > 1 else None
    block = TravellingBlock(plan, shards[0], expected, BlockTimes.new(backend))
    RawUnpack(backend)(slot, block)
    return slot


@given(runs, sizes, alignments)
@bounded
@example(0, 2, 256)
@example(1, 64, 64)
@example(16 * 64, 64, 64)
@example(10, 3, 64)
def test_every_byte_of_the_run_is_kept_by_exactly_one_rank(
    nbytes: int, size: int, alignment: int
) -> None:
    plan = ShardPlan.cut(nbytes, size, alignment)
    kept = torch.zeros(nbytes, dtype=torch.int32)
    for rank in range(size):
        for piece in plan.pieces(rank):
            assert 0 <= piece.start < piece.stop <= nbytes or nbytes == 0
            kept[piece.start : piece.stop] += 1
    assert bool((kept == 1).all())


@given(runs, sizes, alignments)
@bounded
def test_pieces_ascend_do_not_overlap_and_leave_the_trailer_alone(
    nbytes: int, size: int, alignment: int
) -> None:
    plan = ShardPlan.cut(nbytes, size, alignment)
    room = plan.nbytes - (TRAILER_NBYTES if size > 1 else 0)
    for rank in range(size):
        ends = [(piece.at, piece.at + piece.stop - piece.start) for piece in plan.pieces(rank)]
        assert all(start >= 0 and stop <= room for start, stop in ends)
        assert all(before[1] <= after[0] for before, after in pairwise(ends))


@given(runs, sizes, alignments)
@bounded
@example(0, 2, 256)
@example(16 * 64, 64, 64)
def test_gathered_and_unpacked_shards_are_the_run(nbytes: int, size: int, alignment: int) -> None:
    run = random_run(nbytes)
    plan = ShardPlan.cut(nbytes, size, alignment)
    slot = gather(plan, shards_of(run, plan), slack=64)
    assert torch.equal(slot.buffer[:nbytes], run)
    assert bool((slot.buffer[plan.padded_nbytes :] == 0xEE).all()), "wrote beyond the block"
    assert not slot.check.failed()


@given(runs, st.integers(2, 64), alignments)
@bounded
def test_shards_are_equal_aligned_and_end_in_the_trailer_of_their_rank(
    nbytes: int, size: int, alignment: int
) -> None:
    plan = ShardPlan.cut(nbytes, size, alignment)
    shards = shards_of(random_run(nbytes), plan)
    assert plan.nbytes % alignment == 0
    assert {shard.nbytes for shard in shards} == {plan.nbytes}
    assert plan.padded_nbytes == size * plan.nbytes
    for rank, shard in enumerate(shards):
        assert bytes(shard[-TRAILER_NBYTES:].tolist()) == trailer(DIGEST, BLOCK, rank)


@given(st.lists(st.integers(0, 5000), max_size=20), sizes, alignments)
@bounded
def test_a_rank_keeps_its_part_of_the_block_alignment_and_padding_and_no_more(
    tensors: list[int], size: int, alignment: int
) -> None:
    # DESIGN.md, invariant 2. Padding: the trailer and at most one alignment, or, for a block far
    # smaller than the group, the room for the spill.
    run = 0
    for nbytes in tensors:
        run = align_up(run + nbytes, alignment)
    plan = ShardPlan.cut(run, size, alignment)
    spill_room = align_up(TRAILER_NBYTES * size, alignment)
    of_tensors = (sum(tensors) + (alignment - 1) * len(tensors)) / size
    assert plan.nbytes <= max(of_tensors + TRAILER_NBYTES + alignment, spill_room)
    assert size > 1 or plan.nbytes == run


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_a_block_of_real_size_costs_less_than_one_per_cent_more_than_its_part(size: int) -> None:
    nbytes = 64 * 2**20
    plan = ShardPlan.cut(nbytes, size, 512)
    assert nbytes / size <= plan.nbytes <= 1.01 * nbytes / size


def test_a_group_of_one_keeps_the_run_as_it_is() -> None:
    plan = ShardPlan.cut(1000, 1, 256)
    assert plan.nbytes == plan.padded_nbytes == 1000
    assert [(p.start, p.stop, p.at) for p in plan.pieces(0)] == [(0, 1000, 0)]


@given(st.integers(1, 9000), st.integers(2, 9), st.data())
@bounded
def test_shards_of_another_block_or_another_place_are_noticed(
    nbytes: int, size: int, data: st.DataObject
) -> None:
    plan = ShardPlan.cut(nbytes, size, 64)
    shards = shards_of(random_run(nbytes), plan)
    where = data.draw(st.integers(0, size - 1))
    wrong = data.draw(
        st.sampled_from(
            [
                trailer(DIGEST, BLOCK + 1, where),
                trailer(DIGEST, BLOCK, (where + 1) % size),
                trailer(hashlib.sha256(b"other").digest(), BLOCK, where),
            ]
        )
    )
    shards[where][-TRAILER_NBYTES:] = torch.frombuffer(bytearray(wrong), dtype=torch.uint8)
    assert gather(plan, shards).check.failed()


def test_a_difference_once_seen_is_remembered() -> None:
    plan = ShardPlan.cut(500, 2, 64)
    good = shards_of(random_run(500), plan)
    slot = gather(plan, good[::-1])
    block = TravellingBlock(
        plan, good[0], expected_trailers(DIGEST, BLOCK, 2), BlockTimes.new(CpuBackend())
    )
    slot.buffer[: plan.padded_nbytes] = torch.cat(good)
    RawUnpack(CpuBackend())(slot, block)
    assert slot.check.failed()


def test_trailers_tell_digest_block_and_rank_apart() -> None:
    ends = {
        trailer(digest, block, rank)
        for digest in (DIGEST, DIGEST[::-1])
        for block in (0, 1, 2**31)
        for rank in (0, 1, 63)
    }
    assert len(ends) == 18
    assert {len(end) for end in ends} == {TRAILER_NBYTES}
