"""The recorder sees what the host writes, by whatever way, and whether a copy is still reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernels import Program

import dlo_core as dlo
from dlo_core.rawbytes import move_bytes
from dlo_core.testing import MODES, Recorder, SimBackend, World
from dlo_core.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.engine import Engine

HOST_SLAB = "writes host slab"
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


@pytest.mark.parametrize("mode", MODES)
def test_an_update_of_packed_weights_waits_for_what_it_copies_back(mode: str) -> None:
    """What the device writes into host memory is not taken for the host's own."""
    recorder = Recorder()
    backend = SimBackend(World(mode=mode), recorder=recorder, host_ahead=True)
    model, fresh = Program(5), Program(5, seed=1)
    offloaded = dlo.offload(model, device=backend, packed=True)
    recorder.watch(offloaded)
    run(backend, model)
    offloaded.update_weights(fresh.state_dict())
    x = torch.ones(2, 8)
    with torch.no_grad(), backend.compute():
        out = model(x)
    recorder.check()
    assert torch.equal(out, fresh(x))
    assert any(each.op == "copy" and HOST_SLAB in str(each) for each in recorder.log)
    assert not any(each.op == "host" and HOST_SLAB in str(each) for each in recorder.log)
    offloaded.shutdown()


# The host comes before the copy or after it; nothing orders them in either case.
@pytest.mark.parametrize("early", [(), ("compute",)])
@pytest.mark.parametrize("waits", [True, False])
def test_a_host_write_behind_what_the_device_copies_back_has_to_wait(
    waits: bool, early: tuple[str, ...]
) -> None:
    backend, recorder, offloaded, _ = start(early)
    backend.synchronize()
    slab = offloaded.engine.store.slab
    backend.copy(slab[:64], backend.empty(64).fill_(7))
    if waits:
        backend.current_stream().synchronize()
    past_torch(offloaded.engine)
    backend.synchronize()
    assert any(HOST[0] in str(race) for race in recorder.races) != waits
    offloaded.shutdown()
