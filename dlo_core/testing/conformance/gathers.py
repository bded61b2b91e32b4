"""The checks of a collective: each runs on every member of a group at once.

They are functions of a module, so that a spawned process can be given one by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import dlo_core
from dlo_core.testing.conformance.engine import assert_same_passes
from dlo_core.testing.conformance.lab import Lab, pattern
from dlo_core.testing.conformance.member import TIMEOUT_S
from dlo_core.testing.toys import assert_restored, make_portable_toy, snapshot, twin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.interface import Collective
    from dlo_core.testing.conformance.member import Member

__all__ = [
    "close_alone",
    "gather_bytes",
    "gather_in_turns",
    "gather_many",
    "gather_on_compute",
    "gather_over_two_groups",
    "run_model",
    "tell_rank_and_size",
]

_ROUNDS = 8


def whole(size: int, nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return what a gather of every rank's ``part`` gives."""
    return torch.cat([part(rank, nbytes, seed) for rank in range(size)])


def part(rank: int, nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return the shard of ``rank``."""
    return pattern(nbytes, 1000 * seed + rank)


def tell_rank_and_size(member: Member) -> None:
    """Compare the attributes with the group's."""
    collective = member.new_collective()
    assert (collective.rank, collective.size) == (member.rank, member.size), (
        f"the collective says rank {collective.rank} of {collective.size}; in its group it is rank "
        f"{member.rank} of {member.size}"
    )
    assert repr(collective)
    member.barrier()
    collective.close()


def gather_bytes(member: Member, sizes: Sequence[int], in_place: bool) -> None:
    """Gather shards of one size after the other, each waited for."""
    lab, collective = Lab(member.backend), member.new_collective()
    for nbytes in sizes:
        stream, out = lab.stream(), lab.device(member.size * nbytes)
        shard = lab.device(nbytes, 1000 + member.rank)
        if in_place:
            own = out[member.rank * nbytes : (member.rank + 1) * nbytes]
            own.copy_(shard)
            member.backend.synchronize()
            shard = own
        with member.backend.stream(stream):
            collective.all_gather(out, shard)
        stream.synchronize()
        assert_equal(lab.read(out), whole(member.size, nbytes, 1), f"shards of {nbytes} bytes")
    finish(member, collective, lab)


def gather_many(member: Member) -> None:
    """Queue gathers of many sizes without a wait between them."""
    lab, collective = Lab(member.backend), member.new_collective()
    sizes = [256, 16, 4096, 256, 256, (1 << 20) + 256, 16, 256, 8192, 256]
    shards = [lab.device(n, 1000 * seed + member.rank) for seed, n in enumerate(sizes)]
    outs = [lab.device(member.size * nbytes) for nbytes in sizes]
    stream = lab.stream()
    for out, shard in zip(outs, shards, strict=True):
        with member.backend.stream(stream):
            collective.all_gather(out, shard)
    stream.synchronize()
    for seed, (out, nbytes) in enumerate(zip(outs, sizes, strict=True)):
        assert_equal(lab.read(out), whole(member.size, nbytes, seed), f"gather {seed}")
    finish(member, collective, lab)


def gather_in_turns(member: Member) -> None:
    """Copy to a stage, gather into a slot, compute: only events keep the rounds apart."""
    backend, nbytes = member.backend, 4096
    lab, collective = Lab(backend), member.new_collective()
    copying, gathering, compute = lab.stream(), lab.stream(), backend.current_stream()
    stage, slot = lab.device(nbytes), lab.device(member.size * nbytes)
    stage_filled, stage_drained = backend.new_event(), backend.new_event()
    slot_filled, slot_drained = backend.new_event(), backend.new_event()
    sources = [lab.host(nbytes, 1000 * seed + member.rank) for seed in range(_ROUNDS)]
    seen = []
    for number, src in enumerate(sources):
        # In turns the ranks are slow, and the copies or the gathers are.
        if number % member.size == member.rank:
            lab.busy((copying, gathering)[number % 2], 6)
        with backend.stream(copying):
            copying.wait_event(stage_drained)
            backend.copy(stage, src)
            copying.record_event(stage_filled)
        with backend.stream(gathering):
            gathering.wait_event(stage_filled)
            gathering.wait_event(slot_drained)
            collective.all_gather(slot, stage)
            gathering.record_event(stage_drained)
            gathering.record_event(slot_filled)
        compute.wait_event(slot_filled)
        seen.append(slot.clone())
        compute.record_event(slot_drained)
    for number, out in enumerate(seen):
        assert_equal(lab.read(out), whole(member.size, nbytes, number), f"round {number}")
    finish(member, collective, lab)


def gather_on_compute(member: Member) -> None:
    """Gather on the stream that is current without a context."""
    lab, collective = Lab(member.backend), member.new_collective()
    out, shard = lab.device(member.size * 256), lab.device(256, 1000 + member.rank)
    collective.all_gather(out, shard)
    seen = out.clone()
    assert_equal(lab.read(seen), whole(member.size, 256, 1), "compute")
    finish(member, collective, lab)


def gather_over_two_groups(member: Member) -> None:
    """Gather over two groups of the same ranks at once."""
    lab = Lab(member.backend)
    pairs = [(member.new_collective(), lab.stream()) for _ in range(2)]
    outs = [[lab.device(member.size * 512) for _ in range(6)] for _ in pairs]
    for number in range(6):
        for which, (collective, stream) in enumerate(pairs):
            shard = lab.device(512, 1000 * (10 * which + number) + member.rank)
            with member.backend.stream(stream):
                collective.all_gather(outs[which][number], shard)
            stream.synchronize()
    for which, _ in enumerate(pairs):
        for number, out in enumerate(outs[which]):
            wanted = whole(member.size, 512, 10 * which + number)
            assert_equal(lab.read(out), wanted, f"group {which}, gather {number}")
    finish(member, pairs[0][0], lab)
    pairs[1][0].close()


def close_alone(member: Member) -> None:
    """Close on one rank after the other, twice each; nobody may wait for anybody."""
    lab, collective = Lab(member.backend), member.new_collective()
    out, shard = lab.device(member.size * 256), lab.device(256, 1000 + member.rank)
    gather_alone(lab, collective, out, shard)
    for turn in range(member.size):
        if turn == member.rank:
            collective.close()
            collective.close()
        member.barrier()
    assert_equal(lab.read(out), whole(member.size, 256, 1), "before the close")
    # A group that was closed makes room for the next.
    again = member.new_collective()
    gather_alone(lab, again, out.zero_(), shard)
    assert_equal(lab.read(out), whole(member.size, 256, 1), "after the close")
    finish(member, again, lab)


def gather_alone(lab: Lab, collective: Collective, out: torch.Tensor, shard: torch.Tensor) -> None:
    """Gather on a side stream of its own, when all else is done, and wait."""
    lab.settle()
    stream = lab.stream()
    with lab.backend.stream(stream):
        collective.all_gather(out, shard)
    stream.synchronize()


def run_model(member: Member, settings: Sequence[dict[str, Any]]) -> None:
    """Offload a model over the group, and compare it with the resident run."""
    backend, model = member.backend, make_portable_toy(5)
    resident = twin(model).to(backend.device)
    before = snapshot(model)
    for each in settings:
        offloaded = dlo_core.offload(
            model, device=backend, group=member.group, timeout_s=TIMEOUT_S, **each
        )
        assert (offloaded.rank, offloaded.size) == (member.rank, member.size)
        with torch.inference_mode():
            assert_same_passes(model, resident, backend.device)
        offloaded.disable()
        assert_restored(model, before)
    member.barrier()


def finish(member: Member, collective: Collective, lab: Lab) -> None:
    """Leave together, so that nobody's group goes while another still works."""
    lab.close()
    member.barrier()
    collective.close()


def assert_equal(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    """Compare, and say where the first difference is; a rank's report is text."""
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    if not torch.equal(got, wanted):
        at = int((got != wanted).nonzero()[0])
        raise AssertionError(f"{what}: byte {at} of {wanted.numel()} is wrong")
