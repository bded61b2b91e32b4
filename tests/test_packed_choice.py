"""``packed="auto"``: what is faster is chosen, and no switch changes a bit."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from faults import failing_at
from ranks import run_ranks
from safetensors.torch import save_file
from test_packed_engine import SHORT, Model, data, new_values
from toys import TOYS, inputs, same_bits, twin

import dlo_core as dlo
from dlo_core import coder
from dlo_core.coder import Coder
from dlo_core.cpu import CpuBackend
from dlo_core.errors import AgreementError, ConfigError, DloError, UseError
from dlo_core.host import HostStore
from dlo_core.packed_choice import PackedChoice
from dlo_core.packed_figures import Figures, Form
from dlo_core.packed_switch import Switch, more_residents
from dlo_core.trace import spans

if TYPE_CHECKING:
    from pathlib import Path

    from dlo_core.streamer import Streamer


def figures(compute: float, link: float, decode: float = 10.0, ratio: float = 0.68) -> Figures:
    return Figures(compute, link, decode, ratio)


def test_packing_is_for_passes_that_the_link_bounds() -> None:
    # Compute-bound, or nearly so: it would only add the decoding.
    for compute in (201.0, 195.0, 190.0):
        assert figures(compute, 200.0).choose(Form.RAW) is Form.RAW
    for compute in (0.0, 50.0, 150.0, 180.0):
        assert figures(compute, 200.0).choose(Form.RAW) is Form.PACKED
    # A gain of less than the noise is no reason.
    assert figures(0.0, 200.0, ratio=0.98).choose(Form.RAW) is Form.RAW
    # Once packed, it stays so until it loses.
    assert figures(189.0, 200.0).choose(Form.PACKED) is Form.PACKED
    assert figures(220.0, 200.0).choose(Form.PACKED) is Form.RAW


def test_resident_blocks_are_packed_where_the_computation_has_room_for_them() -> None:
    # 10 ms of decoding more, for a fifth of the link's bytes.
    stay: dict[str, Any] = {"stay_decode_ms": 10.0, "spared": 0.2}
    for form in Form:
        assert replace(figures(50.0, 200.0), **stay).choose(form) is Form.ALL
        assert replace(figures(195.0, 200.0), **stay).choose(form) is Form.RAW
    # The link is the bound of packed weights; but for all, the computation would be.
    tight = replace(figures(125.0, 200.0), **stay)
    assert tight.choose(Form.RAW) is tight.choose(Form.PACKED) is Form.PACKED
    assert tight.choose(Form.ALL) is Form.PACKED
    # Where no block comes to stay, those that do are not decoded.
    assert replace(figures(50.0, 200.0), stay_decode_ms=10.0).choose(Form.RAW) is Form.PACKED


def test_the_memory_of_raw_blocks_holds_more_packed_ones_evenly_spread() -> None:
    nbytes = dict.fromkeys(range(12), 70)
    assert more_residents([2, 6, 10], [0, 1, 3, 4, 5, 7, 8, 9, 11], nbytes, 300) == (5,)
    assert more_residents([2], range(4, 12), nbytes, 3 * 70 + 69) == (6, 10)
    assert more_residents([2], [3], nbytes, 100) == more_residents([], [], nbytes, 0) == ()


def test_ranks_that_gather_go_by_the_slowest_of_them() -> None:
    mine = Figures(10.0, 50.0, 2.0, 0.6, 1.0, 0.3, (30.0, 40.0))
    theirs = Figures(30.0, 20.0, 3.0, 0.7, 0.5, 0.2, (50.0, 35.0))
    # A rank that waited for another one in a gather took longer for it than the link.
    assert Figures.slowest([mine, theirs]) == Figures(30.0, 65.0, 3.0, 0.7, 1.0, 0.2)


def test_the_choice_is_never_more_than_one_percent_slower_than_raw() -> None:
    for compute, spared in product(range(0, 400, 5), (0.0, 0.2, 1.0)):
        row = replace(figures(float(compute), 200.0), stay_decode_ms=10.0, spared=spared)
        for form in Form:
            assert row.limit_ms(row.choose(form)) <= 1.011 * row.raw_ms


class Told:
    """Figures as the test wants them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compute = 0.0
        self.spared = 0.0
        self.measures = False
        self.seen: Figures | None = None
        real = PackedChoice.figures

        def figures(choice: PackedChoice, streamer: Streamer) -> Figures | None:
            self.seen = real(choice, streamer)
            return self.seen if self.measures else self.figures()

        monkeypatch.setattr(PackedChoice, "figures", figures)
        monkeypatch.setattr("dlo_core.packed_choice._EVERY", 1)
        monkeypatch.setattr("dlo_core.packed_choice._TIMES", 1)
        monkeypatch.setattr("dlo_core.packed_choice._MOST_SWITCHES", 99)

    def figures(self) -> Figures:
        return replace(figures(self.compute, 200.0), spared=self.spared)


def lopsided(num_blocks: int, hidden: int) -> Model:
    """Return a model whose blocks do not fall apart between two tensors."""
    model = Model(num_blocks, hidden)
    for block in model.blocks:
        ballast = torch.randn(96 * hidden // 4).bfloat16()
        block.register_parameter("ballast", torch.nn.Parameter(ballast, requires_grad=False))
    return model


def cuts_a_tensor(offloaded: dlo.LayerwiseOffload) -> bool:
    """Return whether each rank's part of each block ends inside of a tensor."""
    engine = offloaded.engine
    assert engine is not None
    return all(
        any(
            tensor.offset < end - 16 < end <= tensor.offset + tensor.nbytes
            for tensor in layout.tensors
        )
        for layout, cut in zip(engine.layouts, engine.shards, strict=True)
        for end in range(cut.nbytes, cut.nbytes * cut.size, cut.nbytes)
    )


def changes(rank: int, told: Told, settings: dict[str, Any]) -> None:
    """Go through all forms, and look at every bit in each."""
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    # Each rank's part gets smaller.
    model = lopsided(6, hidden=600 if group is None else 1000)
    resident = twin(model)
    gc.collect()
    held = CpuBackend().memory().allocated
    # Here it looks after every pass, so each must have times.
    given = {"group": group, "packed": "auto", "time_every": 1, **SHORT, **settings}
    given["resident_scope"] = "stage"
    offloaded = dlo.offload(model, device="cpu", **given)
    assert cuts_a_tensor(offloaded)
    promised = offloaded.footprint
    stay = int(settings.get("resident_layers", 0))

    def passes(count: int, form: Form) -> dlo.Stats:
        for _ in range(count):
            with torch.inference_mode():
                assert torch.equal(model(data()), resident(data()))
        stats = offloaded.stats()
        assert (stats.packed_reason or "").startswith(f"{form.value}: computation ")
        # Also where nothing is copied any more, for every block that streams has its slot.
        assert told.seen is None or told.seen.link_ms > 0.0
        if form is Form.ALL and offloaded.size < 3:
            assert told.seen is None or told.seen.spared > 0.0
        assert CpuBackend().memory().allocated - held <= stats.device_bytes
        assert stats.device_bytes <= promised.device_nbytes
        assert stats.host_bytes == promised.host_nbytes
        waits = {span.block for span in spans(offloaded) if span.lane == "wait"}
        assert waits >= {block.name for block in stats.blocks if not block.resident}
        blocks = [block for block in stats.blocks if block.resident]
        # The memory of three raw ones holds four, but of three ranks' padding, too.
        assert len(blocks) == (4 if form is Form.ALL and offloaded.size < 3 else stay)
        return stats

    def look_at_state() -> None:
        state = offloaded.state_dict()
        assert state is not None
        assert all(same_bits(state[name], value) for name, value in resident.state_dict().items())

    def update() -> None:
        values = new_values(resident)
        offloaded.update_weights(values)
        resident.load_state_dict(values)
        # They may pack worse than the old ones; the choice is made anew.
        assert offloaded.stats().packed_ratio is None
        assert offloaded.stats().packed_reason in ("raw: the weights were updated", raw_reason)

    raw_reason: str | None = None
    stats = passes(5, Form.PACKED)
    engine = offloaded.engine
    assert engine is not None
    # The events that were the slots' in raw passes keep the blocks' times only.
    ends = {id(block.times.compute_end) for block in engine.blocks}
    assert not ends & {id(slot.drained) for slot in engine.pool.slots}
    ratio = stats.packed_ratio
    assert ratio is not None
    assert ratio < 0.95
    assert [block.decode_ms > 0 for block in stats.blocks if block.resident] == [False] * stay
    look_at_state()
    update()
    passes(6, Form.PACKED)
    if stay:
        told.spared = 0.2
        stats = passes(3, Form.ALL)
        assert all(block.decode_ms > 0 for block in stats.blocks)
        offloaded.offload_resident_layers()
        assert offloaded.stats().resident_bytes == 0
        update()
        passes(6, Form.ALL)
        look_at_state()
    told.compute = 300.0
    raw_reason = passes(4, Form.RAW).packed_reason
    look_at_state()
    update()
    passes(1, Form.RAW)
    told.compute, told.spared = 0.0, 0.2 if stay else 0.0
    passes(7, Form.ALL if stay else Form.PACKED)
    if group is None or not stay:
        # What a CPU takes for the decoding; ranks remember what they were told of the link.
        told.measures = True
        passes(4, Form.RAW)
    offloaded.disable()
    assert all(same_bits(model.state_dict()[k], v) for k, v in resident.state_dict().items())


@pytest.mark.parametrize(
    "settings",
    [
        {"resident_layers": 3},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"depth": 3}, marks=pytest.mark.slow),
    ],
)
def test_no_switch_changes_a_bit(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    changes(0, Told(monkeypatch), settings)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {}),
        (2, {"stages": 0, "resident_layers": 3}),
        pytest.param(3, {"resident_layers": 3}, marks=pytest.mark.slow),
        pytest.param(4, {"stages": 0, "depth": 3}, marks=pytest.mark.slow),
    ],
)
def test_no_switch_changes_a_bit_where_weights_are_gathered(
    ranks: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(partial(changes, told=Told(monkeypatch), settings=settings), ranks)


def test_a_budget_holds_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    told = Told(monkeypatch)
    told.spared = 0.2
    model = lopsided(8, hidden=600)
    with dlo.offload(model, device="cpu", packed="auto", resident_layers=4) as offloaded:
        budget = offloaded.footprint.device_nbytes
    gc.collect()
    held = CpuBackend().memory().allocated
    given: dict[str, Any] = {"resident_layers": "auto", "device_budget_bytes": budget}
    offloaded = dlo.offload(model, device="cpu", packed="auto", **given)
    counts = []
    for _ in range(5):
        with torch.inference_mode():
            model(data())
        assert CpuBackend().memory().allocated - held <= budget
        counts.append(sum(block.resident for block in offloaded.stats().blocks))
    assert counts == [4, 4, 4, 5, 5]
    offloaded.disable()


def test_shards_that_lie_in_several_parts_change_their_form_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    told = Told(monkeypatch)
    monkeypatch.setattr("dlo_core.arena._rounds", lambda *_: True)
    monkeypatch.setattr("dlo_core.arena.cut", lambda nbytes: [8192] * -(-nbytes // 8192))
    model = Model(3)
    resident = twin(model)
    offloaded = dlo.offload(model, device="cpu", packed="auto")
    for compute, packed in ((0.0, True), (300.0, False)):
        told.compute = compute
        for _ in range(5):
            with torch.inference_mode():
                assert torch.equal(model(data()), resident(data()))
        assert (offloaded.stats().packed_ratio is not None) is packed
    offloaded.disable()
    assert all(same_bits(model.state_dict()[k], v) for k, v in resident.state_dict().items())


def test_a_device_without_room_keeps_the_form_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    told = Told(monkeypatch)
    real, left = CpuBackend.empty, [0]

    def empty(self: CpuBackend, nbytes: int) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no memory for this")
        return real(self, nbytes)

    model = Model(3)
    resident = twin(model)

    def passes(offloaded: dlo.LayerwiseOffload, count: int) -> str:
        for _ in range(count):
            with torch.inference_mode():
                assert torch.equal(model(data()), resident(data()))
        return offloaded.stats().packed_reason or ""

    # It codes in the slots, so it takes the buffer to decode into, and nothing to go back.
    for room in (0, 1):
        told.compute = 0.0
        offloaded = dlo.offload(model, device="cpu", packed="auto")
        with monkeypatch.context() as patched:
            left[0] = room
            patched.setattr(CpuBackend, "empty", empty)
            reason = passes(offloaded, 5)
            if not room:
                assert reason.startswith("raw: there is no room on the device to pack the blocks")
            else:
                assert reason.startswith("packed: computation")
                told.compute = 300.0
                assert passes(offloaded, 5).startswith("raw: computation")
        offloaded.disable()


@pytest.mark.parametrize("what", ["trial", "measure", "reserve"])
def test_what_a_codec_raises_leaves_the_weights_raw(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler of kernels may lack something on this machine, and raise whatever it likes."""

    def refuse(*_: object, **__: object) -> Any:
        raise OSError("no C compiler")

    torch.set_num_threads(1)
    Told(monkeypatch)
    monkeypatch.setattr(Coder, what, refuse)
    model = Model(4)
    resident = twin(model)
    with dlo.offload(model, device="cpu", packed="auto") as offloaded, torch.inference_mode():
        for _ in range(6):
            assert torch.equal(model(data()), resident(data()))
        reason = offloaded.stats().packed_reason or ""
    assert reason.startswith("raw: what it takes to pack")
    assert reason.endswith("is missing: OSError: no C compiler")


def test_blocks_of_another_model_that_are_called_inside_of_others_keep_all_raw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All models decode into the one buffer; the one that asks first has no such blocks."""
    torch.set_num_threads(1)
    Told(monkeypatch)
    plain, nesting = Model(4), TOYS["called inside another"]()
    twins = twin(plain), twin(nesting)
    offloaded = dlo.offload([plain, nesting], device="cpu", packed="auto")
    with offloaded, torch.inference_mode():
        for number in range(6):
            assert torch.equal(plain(data()), twins[0](data()))
            assert torch.equal(nesting(inputs(number)), twins[1](inputs(number)))
        reason = offloaded.stats().packed_reason or ""
    assert reason.startswith("raw: blocks are called inside of others")


def test_a_row_that_decodes_wrong_in_its_last_byte_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is compared in pieces."""
    real: Any = vars(coder)["decode_segment"]

    def decode(codec: Any, row: torch.Tensor, out: torch.Tensor) -> None:
        real(codec, row, out)
        out[-1] ^= 1

    monkeypatch.setattr(coder, "_PIECE_NBYTES", 4096)
    monkeypatch.setattr(coder, "decode_segment", decode)
    run = torch.zeros(16384, dtype=torch.uint8)
    with pytest.raises(DloError, match="do not come out as they went in"):
        Coder(CpuBackend(), verify=True).encode(run, [(0, 16384)], 16384)


@pytest.mark.parametrize("packed", [False, True, "auto"])
def test_an_engine_ends_with_its_last_user(packed: bool | str) -> None:
    torch.set_num_threads(1)
    gc.collect()
    held = CpuBackend().memory().allocated
    model = Model(2)
    offloaded = dlo.offload(model, device="cpu", packed=packed)
    with torch.inference_mode():
        model(data())
    last = [offloaded]
    del offloaded
    assert_ends(last, held)


def assert_ends(last: list[dlo.LayerwiseOffload], allocated: int) -> None:
    """Take the last reference out of the list; engine and memory go without the collector."""
    gc.disable()
    try:
        engine = weakref.ref(last[0].engine)
        last.pop().disable()
        assert engine() is None
        assert CpuBackend().memory().allocated == allocated
    finally:
        gc.enable()


def test_a_cpu_measures_that_its_decoding_is_slow() -> None:
    torch.set_num_threads(1)
    model = Model(3)
    resident = twin(model)
    offloaded = dlo.offload(model, device="cpu", packed="auto")
    with torch.inference_mode():
        for _ in range(5):
            assert torch.equal(model(data()), resident(data()))
    reason = offloaded.stats().packed_reason
    assert reason is not None
    assert reason.startswith("raw: computation")
    offloaded.shutdown()


def test_blocks_inside_of_others_stay_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    Told(monkeypatch)
    model = TOYS["called inside another"]()
    resident = twin(model)
    offloaded = dlo.offload(model, device="cpu", packed="auto")
    with torch.inference_mode():
        for number in range(6):
            assert torch.equal(model(inputs(number)), resident(inputs(number)))
    reason = offloaded.stats().packed_reason
    assert reason is not None
    assert reason.startswith("raw: blocks are called inside of others")
    offloaded.disable()


class Stop:
    """Raises in the middle of one of the copies of a change, and counts those before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
        self.left = 0
        self.at: list[str] = []
        self._error = error
        self._inside = False
        copy, write, change = CpuBackend.copy, HostStore.write, Switch._in_place

        def copy_some(backend: CpuBackend, dst: torch.Tensor, src: torch.Tensor) -> None:
            if self._stops(f"copy of {src.numel()}"):
                copy(backend, dst[:64], src[:64])
                raise error("here")
            copy(backend, dst, src)

        def write_some(store: HostStore, index: int, start: int, data: torch.Tensor) -> None:
            if self._stops(f"write of {data.numel()}"):
                write(store, index, start, data[:64])
                raise error("here")
            write(store, index, start, data)

        def change_some(switch: Switch, *args: Any) -> None:
            self._inside = True
            try:
                change(switch, *args)
            finally:
                self._inside = False

        monkeypatch.setattr(CpuBackend, "copy", copy_some)
        monkeypatch.setattr(HostStore, "write", write_some)
        monkeypatch.setattr(Switch, "_in_place", change_some)

    def _stops(self, what: str) -> bool:
        if not self._inside or self.left < 1:
            return False
        self.left -= 1
        if not self.left:
            self.at.append(what)
        return not self.left


@pytest.mark.parametrize(
    ("residents", "back", "error"),
    [
        (0, True, OSError),
        (3, False, KeyboardInterrupt),
        # With these every two of the three meet.
        pytest.param(0, False, OSError, marks=pytest.mark.slow),
        pytest.param(0, True, KeyboardInterrupt, marks=pytest.mark.slow),
        pytest.param(3, True, OSError, marks=pytest.mark.slow),
    ],
)
def test_a_change_that_stops_anywhere_loses_nothing(
    residents: int, back: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block then has the form that it has, and all of it can be updated and given back."""
    torch.set_num_threads(1)
    told = Told(monkeypatch)
    told.spared = 0.2 if residents else 0.0
    stop = Stop(monkeypatch, error)
    model = lopsided(5 if residents else 3, hidden=600)
    resident = twin(model)
    x = data()
    wanted = resident(x)
    ratios = set()
    for number in range(1, 60):
        told.compute = 0.0
        given: dict[str, Any] = {"packed": "auto", "resident_layers": residents}
        offloaded = dlo.offload(model, device="cpu", **given)
        seen = len(stop.at)
        with torch.inference_mode():
            for turn in range(11):
                if turn == 5 and back:
                    told.compute = 300.0
                if turn == (5 if back else 0):
                    stop.left = number
                try:
                    assert torch.equal(model(x), wanted)
                except KeyboardInterrupt:
                    assert error is KeyboardInterrupt
        stop.left = 0
        stopped = len(stop.at) > seen
        ratios.add(offloaded.stats().packed_ratio is None)
        if stopped and error is OSError and (not back or "write" in stop.at[-1]):
            # Going back, what the device cannot decode the host does.
            reason = offloaded.stats().packed_reason or ""
            assert "stopped half-way: OSError: here" in reason
        assert offloaded.stats().device_bytes <= offloaded.footprint.device_nbytes
        assert not offloaded.failed
        if number % 3 == 0:
            offloaded.update_weights(resident.state_dict())
            with torch.inference_mode():
                assert torch.equal(model(x), wanted)
        offloaded.disable()
        assert all(same_bits(model.state_dict()[k], v) for k, v in resident.state_dict().items())
        if not stopped:
            break
    # Each block has one copy to the device at least, and one back.
    assert len(stop.at) >= 6
    assert ratios == {True, False} or error is KeyboardInterrupt


def test_a_shutdown_in_another_thread_ends_a_change_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    told = Told(monkeypatch)
    told.compute = 0.0
    model = lopsided(3, hidden=600)
    offloaded = dlo.offload(model, device="cpu", packed="auto")
    change = Switch._in_place

    def shut_down_first(switch: Switch, *args: Any) -> None:
        thread = threading.Thread(target=offloaded.shutdown)
        thread.start()
        thread.join(10.0)
        change(switch, *args)

    monkeypatch.setattr(Switch, "_in_place", shut_down_first)
    with torch.inference_mode():
        for _ in range(3):
            model(data())
        with pytest.raises(UseError, match="its offload was shut down"):
            model(data())


def test_an_interrupt_at_the_choice_ends_the_wait_of_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Told(monkeypatch)

    def child(rank: int) -> None:
        model = Model(3, hidden=500)
        group = torch.distributed.group.WORLD
        offloaded = dlo.offload(model, device="cpu", packed="auto", group=group, **SHORT)
        if rank == 1:
            monkeypatch.setattr(Coder, "measure", interrupted)
        with torch.inference_mode():
            for _ in range(3):
                model(data())
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt if rank else DloError):
                model(data())
            assert time.monotonic() - began < SHORT["timeout_s"] / 2
            with pytest.raises(UseError, match="failed earlier"):
                model(data())
        offloaded.shutdown()

    run_ranks(child, 2)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["_stand_still", "_make_raw"])
def test_an_interrupt_before_an_update_ends_the_wait_of_the_other_ranks(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are decoded first, in exchanges of their own."""
    Told(monkeypatch)

    def child(rank: int) -> None:
        model = Model(3, hidden=500)
        group = torch.distributed.group.WORLD
        given: dict[str, Any] = SHORT | {"load_timeout_s": 60.0}
        offloaded = dlo.offload(model, device="cpu", packed="auto", group=group, **given)
        values = {name: value.roll(1, 0) for name, value in Model(3, hidden=500).named_parameters()}
        with torch.inference_mode():
            for _ in range(4):
                model(data())
        assert offloaded.stats().packed_ratio is not None
        if rank == 1:
            monkeypatch.setattr(PackedChoice, place, interrupted)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt if rank else DloError):
            offloaded.update_weights(values)
        assert time.monotonic() - began < SHORT["timeout_s"] / 2
        with torch.inference_mode(), pytest.raises(UseError, match="failed earlier"):
            model(data())
        offloaded.shutdown()

    run_ranks(child, 2)


def test_blocks_that_come_to_be_called_inside_of_others_make_gathered_weights_raw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Told(monkeypatch)

    def child(rank: int) -> str:
        model = Model(4, hidden=500)
        resident = twin(model)
        group = torch.distributed.group.WORLD
        offloaded = dlo.offload(model, device="cpu", packed="auto", group=group, **SHORT)
        engine = offloaded.engine
        assert engine is not None
        with torch.inference_mode():
            for number in range(8):
                assert torch.equal(model(data()), resident(data()))
                if number == 4:
                    assert offloaded.stats().packed_ratio is not None
                    # As one rank alone has seen it.
                    engine.streamers[0].nests = rank == 1
        assert offloaded.stats().packed_ratio is None
        offloaded.disable()
        return engine.choice.reason if engine.choice else ""

    first, second = run_ranks(child, 2)
    assert first == second
    assert first.startswith("raw: blocks are called inside of others")
    assert first.endswith("(rank 1)")


def test_ranks_look_at_times_of_the_form_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update the last pass with times was one of packed weights."""
    told = Told(monkeypatch)
    looks: list[int] = []
    real = told.figures

    def figures() -> Figures:
        looks.append(1)
        return real()

    monkeypatch.setattr(told, "figures", figures)

    def child(rank: int) -> list[bool]:
        model = Model(3, hidden=500)
        group = torch.distributed.group.WORLD
        offloaded = dlo.offload(model, device="cpu", packed="auto", group=group, **SHORT)
        packed = []
        with torch.inference_mode():
            for number in range(9):
                if number == 5:
                    offloaded.update_weights(dict(Model(3, hidden=500).named_parameters()))
                model(data())
                packed.append(offloaded.stats().packed_ratio is not None)
        offloaded.shutdown()
        return packed

    # Three passes of raw weights come first, as at the beginning.
    wanted = [False] * 3 + [True] * 2 + [False] * 3 + [True]
    assert run_ranks(child, 2) == [wanted, wanted]


def test_weights_that_do_not_get_smaller_stay_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    Told(monkeypatch)
    model = Model(3).float()
    resident = twin(model)
    offloaded = dlo.offload(model, device="cpu", packed="auto")
    for _ in range(5):
        with offloaded.run_pass():
            pass
    reason = offloaded.stats().packed_reason
    assert reason == "raw: block 'blocks.0' does not get smaller"
    offloaded.disable()
    assert all(same_bits(model.state_dict()[k], v) for k, v in resident.state_dict().items())


def test_ragged_waves_change_the_form_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle ranks look, too; one is in the middle of a request, and one has none."""
    Told(monkeypatch)

    def child(rank: int) -> None:
        topology = dlo.Topology.from_sizes(dp=2, device_type="cpu")
        model = Model(3, hidden=500)
        plain = twin(model)

        def sample(of: torch.nn.Module, request: dlo.WaveRequest) -> list[torch.Tensor]:
            with torch.inference_mode():
                outs = [of(data() + step) for step in range(request.num_inference_steps)]
            return [out.clone() for out in outs]

        requests = [dlo.WaveRequest(count, {}, seed=0) for count in (2, 6, 4)]
        offloaded = dlo.offload(model, device="cpu", topology=topology, packed="auto", **SHORT)
        runner = dlo.WaveRunner(
            offloaded, topology=topology, fn=partial(sample, model), ragged=True
        )
        with offloaded, runner:
            results = runner.run(requests if rank == 0 else None)
            assert (offloaded.stats().packed_reason or "").startswith("packed: computation")
        for request, result in zip(requests, results or (), strict=rank == 0):
            pairs = zip(result.get(), sample(plain, request), strict=True)
            assert all(torch.equal(mine, wanted) for mine, wanted in pairs)

    run_ranks(child, 2)


def test_blocks_that_stay_do_not_see_each_others_writes_and_uses() -> None:
    """They lie in one run of memory; one may be loaded, or bound first, while another computes."""
    torch.set_num_threads(1)
    model = TOYS["called inside another"]()
    resident = twin(model)
    given: dict[str, Any] = {"packed": "auto", "resident_layers": len(model.blocks)}
    offloaded = dlo.offload(model, device="cpu", **given)
    engine = offloaded.engine
    assert engine is not None
    buffers = [slot.buffer for slot in engine.pool.residents.values()]
    assert len({buffer.data_ptr() for buffer in buffers}) == len(model.blocks)
    with torch.inference_mode():
        assert torch.equal(model(inputs(0)), resident(inputs(0)))
    versions = [buffer._version for buffer in buffers]
    buffers[0].add_(0)
    assert [buffer._version for buffer in buffers[1:]] == versions[1:]
    offloaded.disable()


def test_blocks_that_stay_in_one_storage_may_be_called_inside_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device of another vendor gives them none of their own; what is kept is noticed still."""
    torch.set_num_threads(1)
    monkeypatch.setattr("dlo_core.residents._apart", lambda part: part)
    model = TOYS["called inside another"]()
    resident = twin(model)
    given: dict[str, Any] = {"packed": "auto", "resident_layers": len(model.blocks)}
    offloaded = dlo.offload(model, device="cpu", **given)
    kept: list[torch.Tensor] = []
    with torch.inference_mode():
        for number in range(3):
            assert torch.equal(model(inputs(number)), resident(inputs(number)))
            if number == 1:
                offloaded.refresh()
        for block in model.blocks[:2]:
            hook = block.register_forward_pre_hook(
                lambda block, _: kept.append(next(block.parameters())[:1])
            )
            with pytest.raises(UseError, match="outlives the block's forward"):
                model(inputs(0))
            hook.remove()
            kept.clear()
        assert torch.equal(model(inputs(0)), resident(inputs(0)))
    offloaded.disable()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_models_with_the_same_slots_change_the_form_together(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch)
    told.spared = 0.2

    def child(rank: int) -> None:
        models = [Model(6, hidden=1100), Model(5, hidden=1200)]
        plain = [twin(model) for model in models]
        given: dict[str, Any] = {"packed": "auto", "resident_layers": 3, **SHORT}
        if ranks > 1:
            given["group"] = torch.distributed.group.WORLD
        offloaded = dlo.offload(models, device="cpu", **given)
        for turn, compute in enumerate((0.0, 0.0, 300.0, 0.0)):
            told.compute = compute
            for number in (0, 1, 1, 0, 1, 0, 0):
                with torch.inference_mode():
                    assert torch.equal(models[number](data()), plain[number](data()))
            form = Form.RAW if compute else Form.ALL
            assert (offloaded.stats().packed_reason or "").startswith(f"{form.value}: comp"), turn
            assert offloaded.stats().device_bytes <= offloaded.footprint.device_nbytes
        offloaded.disable()
        for model, wanted in zip(models, plain, strict=True):
            state = model.state_dict()
            assert all(same_bits(state[name], v) for name, v in wanted.state_dict().items())

    if ranks == 1:
        torch.set_num_threads(1)
        child(0)
    else:
        run_ranks(child, ranks, limit_s=60.0)


@pytest.mark.parametrize(
    "place",
    [
        "packed_store:PackedStore.seal",
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in (
                "packed_choice:PackedChoice.figures",
                "packed_switch:Switch._measure",
                "engine:Engine.change_form",
            )
        ),
    ],
)
def test_what_fails_on_one_rank_at_the_switch_is_an_error_on_all(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is changed, among the shards and behind them."""
    path = tmp_path / "model.safetensors"
    expected = Model(3, hidden=500)
    save_file(expected.state_dict(), path)
    if place != "packed_choice:PackedChoice.figures":
        Told(monkeypatch)
    names = {"load_timeout_s": 20.0, "timeout_s": 1.0, "checkpoint": path, "packed": "auto"}

    def child(rank: int) -> None:
        with torch.device("meta"):
            model = Model(3, hidden=500)
        settings: dict[str, Any] = {"group": torch.distributed.group.WORLD, **names}
        offloaded = dlo.offload(model, device="cpu", **settings)

        def passes(count: int) -> None:
            for _ in range(count):
                with torch.inference_mode():
                    assert torch.equal(model(data()), expected(data()))

        passes(3)
        began = time.monotonic()
        fault = failing_at(f"dlo_core.{place}") if rank else nullcontext()
        with fault, pytest.raises(DloError, match=r"rank 1.*[Ii]njected"):
            passes(3)
        assert time.monotonic() - began < 10
        assert offloaded.failed
        with pytest.raises(UseError, match="failed earlier"):
            passes(1)
        # Shards that are half packed are read again.
        again = dlo.offload(model, device="cpu", reuse=offloaded, **settings)
        passes(2)
        again.disable()
        assert all(same_bits(model.state_dict()[k], v) for k, v in expected.state_dict().items())

    run_ranks(child, 2)


def test_a_rank_that_does_not_come_to_the_choice_is_named() -> None:
    def child(rank: int) -> None:
        model = Model(2)
        given: dict[str, Any] = {"timeout_s": 2.5, "load_timeout_s": 20.0, "packed": "auto"}
        offloaded = dlo.offload(model, device="cpu", group=torch.distributed.group.WORLD, **given)
        with torch.inference_mode():
            for _ in range(3):
                model(data())
            if rank == 0:
                with pytest.raises(AgreementError, match=r"before pass 4: .* rank 1 "):
                    model(data())
            else:
                limit = time.monotonic() + 10
                while not offloaded.failed:
                    assert time.monotonic() < limit
                    time.sleep(0.05)
                with pytest.raises(UseError, match="rank 1 "):
                    model(data())
        offloaded.shutdown()

    run_ranks(child, 2)


def test_ranks_decide_alike_whatever_they_run_and_whatever_room_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One measures and is idle, or skips its last blocks; then one has no memory to pack."""
    told = Told(monkeypatch)

    def child(rank: int) -> list[str]:
        reasons = []
        for look in ("measured", "given"):
            told.measures = look == "measured"
            model = Model(4, hidden=500)
            resident = twin(model)
            settings: dict[str, Any] = {"group": torch.distributed.group.WORLD, **SHORT}
            settings["resident_layers"] = 2 if told.measures else 0
            offloaded = dlo.offload(model, device="cpu", packed="auto", **settings)
            if rank == 1 and look == "given":
                monkeypatch.setattr(Coder, "reserve", no_memory)
            for number in range(6):
                if rank == 1 and number % 2:
                    with offloaded.run_pass():
                        pass
                else:
                    with torch.inference_mode():
                        assert torch.equal(model(data()), resident(data()))
            reasons.append(offloaded.stats().packed_reason or "")
            offloaded.disable()
            state = model.state_dict()
            assert all(same_bits(state[k], v) for k, v in resident.state_dict().items())
        return reasons

    first, second = run_ranks(child, 2)
    assert first == second
    assert first[0].startswith("raw: computation")
    assert first[1].startswith("raw: there is no room on the device to pack the blocks: none left")
    assert first[1].endswith("(rank 1)")


def no_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("none left")


def test_it_cannot_be_had_where_weights_are_shared() -> None:
    with pytest.raises(ConfigError, match="host='shared' cannot be had with packed='auto'"):
        dlo.offload(Model(2), device="cpu", packed="auto", host="shared")
