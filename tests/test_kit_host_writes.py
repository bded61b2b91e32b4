"""The recorder sees what the host writes, by whatever way, and whether a copy is still reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernels import Program

import dlo_core as dlo
from dlo_core.rawbytes import move_bytes
from dlo_core.testing import Recorder, SimBackend, World
from dlo_core.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.engine import Engine

HOST = ("host on host writes host slab", "missing: the host's wait for the copy")
SLOT = ("host on host writes slot", "missing:")


def with_torch(engine: Engine) -> None:
    """Change a byte of each shard of the host."""
    engine.store.slab.bitwise_xor_(1)


def past_torch(engine: Engine) -> None:
    """Change a byte as a refit does, without torch."""
    run = engine.store.slab
    move_bytes(run[:1], run[:1].bitwise_xor(1))


def into_slots(engine: Engine) -> None:
    """Write into the slots."""
    for slot in engine.pool.slots:
        slot.buffer.zero_()


WRITES: dict[str, tuple[Callable[[Engine], None], tuple[str, str]]] = {
    "with torch": (with_torch, HOST),
    "past torch": (past_torch, HOST),
    "into slots": (into_slots, SLOT),
}


def start(
    early: tuple[str, ...] = (), *, host_ahead: bool = True
) -> tuple[SimBackend, Recorder, Any, Program]:
    """Return a watched offload."""
    recorder = Recorder()
    backend = SimBackend(World(early=early), recorder=recorder, host_ahead=host_ahead)
    model = Program(5)
    offloaded = dlo.offload(model, device=backend)
    recorder.watch(offloaded)
    return backend, recorder, offloaded, model


def run(backend: SimBackend, model: Program) -> None:
    with torch.no_grad(), backend.compute():
        model(torch.ones(2, 8))


# Whether the copy ran long before or has not begun when the host writes: the events tell.
@pytest.mark.parametrize("early", [(), ("stream 0", "compute")])
@pytest.mark.parametrize("how", WRITES)
def test_a_host_write_that_waited_for_no_copy_is_a_race(how: str, early: tuple[str, ...]) -> None:
    write, words = WRITES[how]
    backend, recorder, offloaded, model = start(early)
    run(backend, model)
    recorder.check()
    write(offloaded.engine)
    with pytest.raises(AssertionError) as caught:
        recorder.check()
    for each in words:
        assert each in str(caught.value)
    offloaded.shutdown()


@pytest.mark.parametrize("host_ahead", [True, False])
@pytest.mark.parametrize("how", WRITES)
def test_a_host_write_that_waited_is_none(how: str, host_ahead: bool) -> None:
    write, _ = WRITES[how]
    backend, recorder, offloaded, model = start(host_ahead=host_ahead)
    for _ in range(2):
        run(backend, model)
        backend.synchronize()
        write(offloaded.engine)
    recorder.check()
    run(backend, model)
    recorder.check()
    offloaded.shutdown()


def test_a_slot_that_the_host_writes_after_its_own_compute_is_no_race() -> None:
    """Where compute is the host itself; the copy that comes next still waits for the compute."""
    backend, recorder, offloaded, model = start(host_ahead=False)
    run(backend, model)
    for slot in offloaded.engine.pool.slots:
        slot.filled.synchronize()
    into_slots(offloaded.engine)
    recorder.check()
    offloaded.shutdown()


@pytest.mark.parametrize("waits", [True, False])
def test_an_update_waits_for_the_copies_that_are_under_way(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, recorder, offloaded, model = start()
    fresh = Program(5, seed=1).state_dict()
    if not waits:
        monkeypatch.setattr(Transfer, "stand_still", lambda self: None)
    run(backend, model)
    offloaded.update_weights(fresh)
    assert any(HOST[0] in str(race) for race in recorder.races) != waits
    offloaded.shutdown()
