"""Statistics: counters are exact, times are sane, and state is shown and logged."""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from toys import Block, Toy, WideBlock, inputs, make_toy

import dlo_core as dlo
from dlo_core import trace
from dlo_core.cpu import CpuBackend
from dlo_core.cpu_stream import CpuEvent, CpuStream, HostStream
from dlo_core.stats import BlockState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.layerwise import LayerwiseOffload
    from dlo_core.stats import Stats
    from dlo_core.trace import Span

SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0}
# A block of the toy: a norm and a linear of width 8, four tensors of at most 256 bytes each.
BLOCK_NBYTES = 4 * 256


def start(model: Toy, **settings: Any) -> LayerwiseOffload:
    group = dist.group.WORLD if dist.is_initialized() else None
    return dlo.offload(model, device=CpuBackend(), group=group, **{**SHORT, **settings})


def run(model: Toy, *programs: Sequence[int]) -> None:
    """Make one forward for each program: the numbers of the blocks that it skips."""
    with torch.inference_mode():
        for skip in programs:
            model(inputs(), skip)


def counters(stats: Stats) -> dict[str, int]:
    return {
        "passes": stats.passes,
        "fills": stats.fills,
        "skipped": stats.skipped_fills,
        "copied": stats.copied_bytes,
        "gathered": stats.gathered_bytes,
    }


# --- counters -------------------------------------------------------------------------------------


def test_enable_fills_all_slots_but_one() -> None:
    with start(make_toy(5), depth=3) as offloaded:
        assert counters(offloaded.stats()) == {
            "passes": 0,
            "fills": 2,
            "skipped": 0,
            "copied": 2 * BLOCK_NBYTES,
            "gathered": 0,
        }


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_each_pass_fills_each_block_once(depth: int) -> None:
    model = make_toy(5)
    with start(model, depth=depth) as offloaded:
        for number in range(1, 4):
            run(model, ())
            fills = 5 * number + depth - 1
            assert counters(offloaded.stats()) == {
                "passes": number,
                "fills": fills,
                "skipped": 0,
                "copied": fills * BLOCK_NBYTES,
                "gathered": 0,
            }


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_blocks_that_all_have_a_slot_are_filled_once_for_ever(num_blocks: int) -> None:
    model = make_toy(num_blocks)
    with start(model, depth=3) as offloaded:
        run(model, (), (), ())
        # Three turns and the prefetch of the fourth; the first turn was made, the rest held.
        asked = 3 * num_blocks + num_blocks - 1
        assert counters(offloaded.stats()) == {
            "passes": 3,
            "fills": num_blocks,
            "skipped": asked - num_blocks,
            "copied": num_blocks * BLOCK_NBYTES,
            "gathered": 0,
        }


def test_a_lone_block_is_filled_once_for_ever() -> None:
    model = make_toy(1)
    with start(model) as offloaded:
        # One slot and no other to prefetch into: the first call fills it.
        assert offloaded.stats().fills == 0
        run(model, (), (), ())
        stats = offloaded.stats()
        assert (stats.passes, stats.fills, stats.copied_bytes) == (3, 1, BLOCK_NBYTES)


def test_rank_local_blocks_that_a_forward_skips_are_not_filled() -> None:
    model = make_toy(6)
    with start(model) as offloaded:
        run(model, ())
        before = offloaded.stats().fills
        run(model, (2, 3, 4))
        # Of six fills: block 2 was on its way already when 3 and 4 turned out to be skipped.
        assert offloaded.stats().fills - before == 4


def test_copied_bytes_are_those_of_the_blocks_that_were_filled() -> None:
    torch.manual_seed(0)
    model = Toy([Block(), WideBlock(), Block(), WideBlock()]).requires_grad_(False).eval()
    with start(model) as offloaded:
        run(model, (), ())
        sizes = [block.nbytes for block in offloaded.stats().blocks]
        assert sizes[0] == sizes[2] == BLOCK_NBYTES
        assert sizes[1] == sizes[3] == 1280 + 256 + 1280 + 256
        assert offloaded.stats().copied_bytes == 2 * sum(sizes) + sizes[0]


@pytest.mark.parametrize(("ranks", "shard_nbytes"), [(2, 768), (3, 512), (4, 512)])
def test_gathers_are_counted_by_what_they_write(ranks: int, shard_nbytes: int) -> None:
    """A shard is its part of the 1024 bytes and a trailer of 16, aligned to 256."""

    def body(rank: int) -> None:
        model = make_toy(5)
        offloaded = start(model)
        run(model, (), ())
        # Two turns and one fill of the third; the copy of the next fill runs ahead.
        assert counters(offloaded.stats()) == {
            "passes": 2,
            "fills": 11,
            "skipped": 0,
            "copied": 12 * shard_nbytes,
            "gathered": 11 * shard_nbytes * ranks,
        }
        # Every rank makes every fill, whatever its own forward skips.
        run(model, (rank, 4))
        assert offloaded.stats().fills == 16
        assert offloaded.stats().gathered_bytes == 16 * shard_nbytes * ranks
        offloaded.disable()

    run_ranks(body, ranks)


def test_gathers_in_place_copy_nothing_ahead() -> None:
    def body(rank: int) -> None:
        model = make_toy(5)
        offloaded = start(model, stages=0)
        run(model, ())
        assert counters(offloaded.stats()) == {
            "passes": 1,
            "fills": 6,
            "skipped": 0,
            "copied": 6 * 768,
            "gathered": 6 * 768 * 2,
        }
        offloaded.disable()

    run_ranks(body, 2)


def test_an_idle_pass_counts_as_a_pass() -> None:
    def body(rank: int) -> None:
        model = make_toy(4)
        offloaded = start(model)
        with offloaded.run_pass():
            pass
        stats = offloaded.stats()
        assert (stats.passes, stats.fills) == (1, 5)
        offloaded.disable()

    run_ranks(body, 2)


def test_two_models_are_counted_together() -> None:
    models = make_toy(4), make_toy(3, seed=1)
    offloaded = dlo.offload(models, device=CpuBackend())
    for model in models:
        run(model, ())
    stats = offloaded.stats()
    assert stats.passes == 2
    assert len(stats.blocks) == 7
    # The first model prefetched one block for nothing: the second took the slots over.
    assert stats.fills == (4 + 1) + (3 + 1)
    offloaded.disable()


def test_statistics_are_plain_values() -> None:
    model = make_toy(3)
    with start(model) as offloaded:
        run(model, ())
        plain = offloaded.stats().to_dict()
        assert plain["passes"] == 1
        assert [block["name"] for block in plain["blocks"]] == list(offloaded.blocks)


def test_statistics_of_what_is_not_enabled_are_refused() -> None:
    offloaded = start(make_toy(3))
    offloaded.disable()
    with pytest.raises(dlo.UseError, match="not enabled"):
        offloaded.stats()
    offloaded.shutdown()
    with pytest.raises(dlo.UseError, match="shut down"):
        offloaded.stats()


def test_a_device_that_failed_leaves_the_counters_readable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asks such a device anything gets its error again."""

    def fail(event: CpuEvent) -> bool:
        raise RuntimeError("the device failed")

    model = make_toy(3)
    offloaded = start(model)
    run(model, ())
    with monkeypatch.context() as patch:
        patch.setattr(CpuEvent, "query", fail)
        stats = offloaded.stats()
        assert trace.spans(offloaded) == ()
    assert (stats.passes, stats.exposed_ms, stats.transfer_ms) == (1, 0.0, 0.0)
    offloaded.shutdown()


# --- times ----------------------------------------------------------------------------------------


def test_there_is_no_overlap_before_the_first_pass() -> None:
    with start(make_toy(3)) as offloaded:
        stats = offloaded.stats()
        assert stats.overlap is None
        assert stats.exposed_ms == stats.transfer_ms == 0
        assert [block.exposed_ms for block in stats.blocks] == [0.0] * 3


@pytest.mark.parametrize("stages", [2, 0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_exposed_times_add_up_and_overlap_is_a_share(ranks: int, stages: int) -> None:
    def body(rank: int) -> None:
        model = make_toy(4)
        offloaded = start(model, stages=stages)
        for _ in range(3):
            run(model, ())
            stats = offloaded.stats()
            assert stats.exposed_ms == pytest.approx(sum(b.exposed_ms for b in stats.blocks))
            assert all(block.exposed_ms >= 0 for block in stats.blocks)
            assert stats.transfer_ms > 0
            assert stats.overlap is not None
            assert 0 <= stats.overlap <= 1
            assert stats.overlap == pytest.approx(max(0, 1 - stats.exposed_ms / stats.transfer_ms))
        offloaded.disable()

    run_ranks(body, ranks)


class PacedBackend(CpuBackend):
    """Takes 100 ms for a copy on a side stream."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a pause and the copy."""
        stream = self.current_stream()
        if not repr(stream).startswith("HostStream"):
            stream.run(lambda: time.sleep(0.1))
        super().copy(dst, src)


def test_waiting_for_a_slow_copy_is_seen_as_exposed() -> None:
    model = make_toy(4)
    offloaded = dlo.offload(model, device=PacedBackend())
    run(model, (), ())
    offloaded.backend.synchronize()
    stats = offloaded.stats()
    # The blocks compute in no time, so nearly every copy is waited for. Wall times only from below.
    # Of the waiting, what this thread was not run for between two blocks is not seen.
    assert stats.transfer_ms >= 4 * 100
    assert stats.exposed_ms >= 2 * 20
    offloaded.disable()


# --- states of blocks -----------------------------------------------------------------------------


def states(offloaded: LayerwiseOffload) -> str:
    """Return one letter a block: w(aiting), f(illed), b(ound)."""
    return "".join(block.state.value[0] for block in offloaded.stats().blocks)


def test_states_follow_the_blocks_through_the_slots() -> None:
    model = make_toy(4)
    offloaded = start(model)
    seen = [states(offloaded)]
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(states(offloaded)))
    run(model, ())
    seen.append(states(offloaded))
    assert seen == ["fwww", "bfww", "wbfw", "wwbf", "fwwb", "fwwf"]
    offloaded.disable()


def test_states_are_strings_for_json() -> None:
    assert [state.value for state in BlockState] == ["waiting", "filled", "bound", "resident"]
    assert isinstance(BlockState.BOUND, str)


# --- the trace ------------------------------------------------------------------------------------


def lanes_of(spans: Sequence[Span], block: str) -> dict[str, Span]:
    found = {span.lane: span for span in spans if span.block == block}
    assert len(found) == sum(span.block == block for span in spans)
    return found


@pytest.mark.parametrize("stages", [2, 0])
def test_a_block_is_copied_then_gathered_then_computed(stages: int) -> None:
    def body(rank: int) -> None:
        model = make_toy(5)
        offloaded = start(model, stages=stages)
        run(model, (), ())
        offloaded.backend.synchronize()
        found = trace.spans(offloaded)
        starts = [span.start_ms for span in found]
        assert starts == sorted(starts)
        # The latest fills of the first two blocks are those of the next pass.
        for name in offloaded.blocks[2:]:
            lanes = lanes_of(found, name)
            assert set(lanes) == {"copy", "gather", "wait", "compute"}
            copy, gather, wait, compute = (
                lanes[lane] for lane in ("copy", "gather", "wait", "compute")
            )
            assert copy.start_ms <= copy.end_ms <= gather.start_ms <= gather.end_ms
            assert gather.end_ms <= wait.end_ms == compute.start_ms <= compute.end_ms
            assert wait.start_ms <= wait.end_ms
        offloaded.disable()

    run_ranks(body, 2)


def test_lanes_do_one_thing_at_a_time_in_ring_order() -> None:
    def body(rank: int) -> None:
        model = make_toy(6)
        offloaded = start(model)
        run(model, (), ())
        offloaded.backend.synchronize()
        found = trace.spans(offloaded)
        for lane in ("copy", "gather", "compute"):
            ours = [span for span in found if span.lane == lane]
            assert all(a.end_ms <= b.start_ms for a, b in pairwise(ours)), lane
        computed = [span.block for span in found if span.lane == "compute"]
        assert computed == list(offloaded.blocks)
        assert all(span.start_ms >= 0 for span in found if span.lane == "compute")
        offloaded.disable()

    run_ranks(body, 2)


def test_rank_local_spans_have_no_gather() -> None:
    model = make_toy(4)
    with start(model) as offloaded:
        run(model, ())
        offloaded.backend.synchronize()
        assert {span.lane for span in trace.spans(offloaded)} == {"copy", "wait", "compute"}


def test_a_skipped_block_has_no_compute() -> None:
    model = make_toy(4)
    with start(model) as offloaded:
        run(model, (), (2,))
        computed = {span.block for span in trace.spans(offloaded) if span.lane == "compute"}
        assert computed == {"blocks.0", "blocks.1", "blocks.3"}


# --- which passes keep times ----------------------------------------------------------------------


class TellingBackend(CpuBackend):
    """Knows which of its events keep the time."""

    def __init__(self) -> None:
        super().__init__()
        self.timing: set[CpuEvent] = set()

    def new_event(self, *, timing: bool = False) -> CpuEvent:
        """Return a new event."""
        made = super().new_event(timing=timing)
        if timing:
            self.timing.add(made)
        return made


def recorded(backend: TellingBackend, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, of each event that is recorded, whether it keeps the time."""
    seen: list[bool] = []

    def watch(kind: Any) -> None:
        inner = kind.record_event

        def record_event(self: Any, event: Any = None) -> Any:
            seen.append(event in backend.timing)
            return inner(self, event)

        monkeypatch.setattr(kind, "record_event", record_event)

    watch(CpuStream)
    watch(HostStream)
    return seen


@pytest.mark.parametrize("residents", [0, 2])
@pytest.mark.parametrize(
    ("every", "timed"),
    [
        (1, [True] * 9),
        (2, [True] * 3 + [False, True, False, True, False, True]),
        (4, [True] * 3 + [False, False, False, True, False, False]),
        (8, [True] * 3 + [False] * 6),
        (0, [False] * 9),
    ],
)
def test_some_passes_keep_times_and_the_others_record_no_event_that_does(
    every: int, timed: list[bool], residents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = make_toy(5), TellingBackend()
    settings: dict[str, Any] = {"time_every": every, "resident_layers": residents}
    with dlo.offload(model, device=backend, **SHORT, **settings):
        seen = recorded(backend, monkeypatch)
        kept = []
        for number, keeps in enumerate(timed):
            seen.clear()
            with torch.inference_mode():
                # The fills behind the last block are the next pass's, queued like this one's.
                model(inputs(), ())
            kept.append(any(seen))
            if not keeps:
                # Two events for each block that streams.
                assert len(seen) == 2 * (5 - residents), number
        # What stays was loaded with times, which the first pass looks at.
        assert kept[1:] == timed[1:]


def test_times_stay_those_of_the_last_pass_that_kept_them() -> None:
    model = make_toy(5)
    with start(model, time_every=4) as offloaded:
        run(model, *[()] * 3)
        # What the last pass loaded ahead may still be on its way, and gets its time when it comes.
        offloaded.backend.synchronize()
        before, spans = offloaded.stats(), trace.spans(offloaded)
        assert {span.lane for span in spans} == {"wait", "copy", "compute"}
        # The next passes keep none, though they run other blocks.
        run(model, (1,), (2, 3))
        after = offloaded.stats()
        assert trace.spans(offloaded) == spans
        assert after.blocks == before.blocks
        assert (after.exposed_ms, after.transfer_ms) == (before.exposed_ms, before.transfer_ms)
        assert after.passes == before.passes + 2
        run(model, (), (1,))
        now = {span.block for span in trace.spans(offloaded) if span.lane == "compute"}
        assert now == {f"blocks.{number}" for number in (0, 2, 3, 4)}


def test_a_pass_that_loads_what_stays_keeps_times() -> None:
    model = make_toy(5)
    settings: dict[str, Any] = {"resident_layers": 2, "resident_scope": "stage", "time_every": 50}
    with start(model, **settings) as offloaded:
        run(model, *[()] * 5)
        offloaded.offload_resident_layers()
        run(model, ())
        staying = [block for block in offloaded.stats().blocks if block.state == "resident"]
        assert len(staying) == 2
        assert all(block.transfer_ms > 0 for block in staying)
        before = offloaded.stats().exposed_ms
        run(model, ())
        assert offloaded.stats().exposed_ms == before


class HostingToy(Toy):
    """Calls a guest, with weights of its own, between two of its blocks."""

    def __init__(self, blocks: Sequence[torch.nn.Module]) -> None:
        super().__init__(blocks)
        self.guests: list[Toy] = []

    def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        """Run the blocks, and the guest in their middle."""
        x = self.pre(x) + self.table + self.position
        for number, block in enumerate(self.blocks):
            if number == 3:
                for guest in self.guests:
                    guest(inputs())
            if number not in skip:
                x = block(x)
        out: torch.Tensor = self.post(x)
        return out


@pytest.mark.parametrize("keeps", [False, True])
def test_a_pass_in_the_middle_of_another_ones_leaves_that_its_kind(keeps: bool) -> None:
    host, guest = HostingToy([Block() for _ in range(5)]).requires_grad_(False), make_toy(4)
    with dlo.offload([host, guest], device=CpuBackend(), time_every=4, **SHORT) as offloaded:
        assert offloaded.engine is not None
        mine = offloaded.engine.streamers[0]
        # One of the next passes keeps times and the other one none.
        run(host, *[()] * (6 if keeps else 5))
        run(guest, *[()] * (5 if keeps else 6))
        kept, spans = mine.last_waited, list(trace._spans(offloaded.engine, mine))
        host.guests.append(guest)
        # Two of the host's blocks run before the guest, and two after it.
        run(host, (1,))
        now = list(trace._spans(offloaded.engine, mine))
        if keeps:
            assert mine.last_waited == (0, 2, 3, 4)
            starts = [span.start_ms for span in now if span.lane == "compute"]
            assert len(starts) == 4
            assert all(start >= 0 for start in starts)
        else:
            assert mine.last_waited == kept
            assert now == spans


@pytest.mark.parametrize("every", [0, 1])
def test_engines_that_call_blocks_and_not_the_root_get_what_they_ask_for(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = make_toy(5), TellingBackend()
    with dlo.offload(model, device=backend, time_every=every, **SHORT):
        seen = recorded(backend, monkeypatch)
        with torch.inference_mode():
            for block in (*model.blocks, *model.blocks):
                block(inputs())
        assert any(seen) is bool(every)


def test_a_walk_between_passes_leaves_the_times() -> None:
    def body(rank: int) -> None:
        model = make_toy(5)
        offloaded = start(model)
        run(model, (), ())
        offloaded.backend.synchronize()
        before, spans = offloaded.stats().blocks, trace.spans(offloaded)
        offloaded.state_dict()
        offloaded.backend.synchronize()
        assert offloaded.stats().blocks == before
        assert trace.spans(offloaded) == spans
        offloaded.disable()

    run_ranks(body, 2)


def test_without_times_the_counters_go_on_and_the_milliseconds_are_zero() -> None:
    model = make_toy(5)
    with start(model, time_every=0) as offloaded:
        run(model, *[()] * 4)
        stats = offloaded.stats()
        assert (stats.passes, stats.fills) == (4, 21)
        assert (stats.exposed_ms, stats.transfer_ms, stats.overlap) == (0.0, 0.0, None)
        assert [span for span in trace.spans(offloaded) if span.lane != "copy"] == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"time_every": -1}, "time_every must be a whole number"),
        ({"time_every": 2.0}, "time_every must be a whole number"),
        ({"time_every": True}, "time_every must be a whole number"),
        ({"time_every": 0, "packed": "auto"}, "chooses by the times"),
        ({"time_every": 9, "packed": "auto"}, "must be 1 to 8 with it"),
    ],
)
def test_other_numbers_of_passes_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(dlo.ConfigError, match=text):
        dlo.OffloadConfig(**settings)


def test_there_are_no_spans_of_what_is_not_enabled() -> None:
    offloaded = start(make_toy(3))
    offloaded.disable()
    assert trace.spans(offloaded) == ()


# --- repr and log ---------------------------------------------------------------------------------


class FailingBackend(CpuBackend):
    """Fails every copy from when it is told to."""

    fails = False

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy or fail."""
        if self.fails:
            raise RuntimeError("the cable is out")
        super().copy(dst, src)


def test_repr_shows_the_state() -> None:
    backend = FailingBackend()
    model = make_toy(4)
    offloaded = dlo.LayerwiseOffload(dlo.OffloadConfig(depth=3), device=backend)
    assert repr(offloaded) == (
        "LayerwiseOffload(not enabled, device='cpu', rank-local, rank 0 of 1, depth=3)"
    )
    offloaded.enable(model)
    assert repr(offloaded).startswith("LayerwiseOffload(Toy, 4 blocks, device='cpu', rank-local")
    backend.fails = True
    with pytest.raises(dlo.FillError, match="the cable is out"):
        run(model, ())
    assert "failed: rank 0: block " in repr(offloaded)
    assert "the cable is out" in repr(offloaded)
    offloaded.shutdown()
    assert repr(offloaded).startswith("LayerwiseOffload(shut down, ")


def test_repr_shows_mode_and_rank() -> None:
    def body(rank: int) -> str:
        offloaded = start(make_toy(3))
        text = repr(offloaded)
        offloaded.disable()
        assert "not enabled" in repr(offloaded)
        return text

    for rank, text in enumerate(run_ranks(body, 2)):
        assert f"gather, rank {rank} of 2" in text


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.kept.append(record)


def logged() -> Records:
    records, logger = Records(), logging.getLogger("dlo")
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    return records


@pytest.mark.parametrize("gathers", [True, False])
def test_enable_and_disable_log_one_line_each_with_the_rank(gathers: bool) -> None:
    def body(rank: int) -> list[tuple[str, str, int]]:
        records = logged()
        model = make_toy(3)
        offloaded = start(model, use_allgather=gathers)
        size = offloaded.footprint.device_nbytes
        run(model, ())
        offloaded.disable()
        assert all(str(vars(record)["rank"]) == str(rank) for record in records.kept)
        assert str(size) in records.kept[0].getMessage()
        announced = "disable() needs all ranks" in records.kept[0].getMessage()
        assert announced == gathers
        return [(r.name, r.levelname, len(r.getMessage().splitlines())) for r in records.kept]

    for lines in run_ranks(body, 2):
        assert lines == [("dlo", "INFO", 1)] * 2


def test_shutdown_logs_once() -> None:
    records = logged()
    try:
        offloaded = start(make_toy(3))
        offloaded.shutdown()
        offloaded.shutdown()
        messages = [record.getMessage() for record in records.kept]
    finally:
        logging.getLogger("dlo").removeHandler(records)
        logging.getLogger("dlo").setLevel(logging.NOTSET)
    assert len(messages) == 2
    assert messages[0].startswith("enabled Toy in rank-local mode: 3 blocks")
    assert messages[1].startswith("shut down")


def test_the_logger_is_silent_by_default() -> None:
    handlers = logging.getLogger("dlo").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
