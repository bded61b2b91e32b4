"""Events: what they mark, what a wait for one means, and what they order."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core.testing.conformance.base import BackendSuite
from dlo_core.testing.conformance.lab import SIZES, pattern

if TYPE_CHECKING:
    from dlo_core.interface import Backend
    from dlo_core.testing.conformance.lab import Lab

__all__ = ["EventConformance"]

_ROUNDS = 12
# A clock of the device and one of the host need not agree to the microsecond.
_CLOCK_MS = 1.0


class EventConformance(BackendSuite):
    """What the interface promises of events.

    Attributes:
        real_time: Whether a device does the work; False for a simulation, whose events count steps.
    """

    real_time = True

    def test_an_event_that_was_never_recorded_counts_as_reached(self, backend: Backend) -> None:
        event = backend.new_event()
        assert event.query()
        event.synchronize()
        backend.current_stream().wait_event(event)
        stream = backend.new_stream()
        stream.wait_event(event)
        stream.synchronize()

    def test_recording_returns_the_event_and_makes_one_where_none_is_given(self, lab: Lab) -> None:
        for stream in (lab.stream(), lab.backend.current_stream()):
            event = lab.backend.new_event()
            assert stream.record_event(event) is event
            made = stream.record_event()
            made.synchronize()
            assert made.query()
            assert event.query()

    def test_an_event_records_itself_on_a_given_or_the_current_stream(self, lab: Lab) -> None:
        stream, dst = lab.stream(), lab.device(64)
        for number, given in enumerate((True, False)):
            src, event = lab.host(64, number), lab.backend.new_event()
            lab.busy(stream, 12)
            with lab.backend.stream(stream):
                lab.backend.copy(dst, src)
                if not given:
                    event.record()
            if given:
                event.record(stream)
            event.synchronize()
            assert torch.equal(dst.cpu(), src)

    def test_a_reached_event_stays_reached_until_it_is_recorded_anew(self, lab: Lab) -> None:
        stream, event = lab.stream(), lab.backend.new_event()
        dst, out = lab.device(64), lab.host(64)
        for seed in range(4):
            lab.busy(stream, 12)
            lab.copy(stream, dst, lab.host(64, seed))
            lab.copy(stream, out, dst)
            stream.record_event(event)
            event.synchronize()
            assert event.query()
            assert event.query()
            assert torch.equal(out, pattern(64, seed)), "reached by an earlier recording"

    @pytest.mark.parametrize("timing", [False, True])
    def test_one_stream_waits_for_another(self, lab: Lab, timing: bool) -> None:
        first, second = lab.stream(), lab.stream()
        middle, dst, src = lab.device(257), lab.device(257), lab.host(257, 1)
        lab.busy(first)
        lab.copy(first, middle, src)
        second.wait_event(first.record_event(lab.backend.new_event(timing=timing)))
        lab.copy(second, dst, middle)
        second.synchronize()
        assert torch.equal(lab.read(dst), src), "the second stream did not wait for the first"

    def test_the_current_stream_waits_for_another(self, lab: Lab) -> None:
        stream, dst, src = lab.stream(), lab.device(257), lab.host(257, 2)
        lab.busy(stream)
        lab.copy(stream, dst, src)
        lab.backend.current_stream().wait_event(stream.record_event())
        seen = dst.clone()
        assert torch.equal(lab.read(seen), src), "the compute stream did not wait"

    def test_another_stream_waits_for_the_current_one(self, lab: Lab) -> None:
        stream, dst = lab.stream(), lab.device(1 << 20)
        for value in range(1, 6):
            # Compute on the current stream, as a block's kernels do it.
            dst.fill_(value)
            stream.wait_event(lab.backend.current_stream().record_event())
            out = lab.host(1 << 20)
            lab.copy(stream, out, dst)
            stream.synchronize()
            assert bool((out == value).all())

    def test_a_wait_means_the_recording_at_the_time_of_the_wait(self, lab: Lab) -> None:
        first, second, third = lab.stream(), lab.stream(), lab.stream()
        middle, dst, src = lab.device(64), lab.device(64), lab.host(64, 3)
        event = lab.backend.new_event()
        lab.busy(first)
        lab.copy(first, middle, src)
        first.record_event(event)
        second.wait_event(event)
        # Recorded anew where nothing is queued: the wait above still means the first stream.
        third.record_event(event)
        lab.copy(second, dst, middle)
        second.synchronize()
        assert torch.equal(lab.read(dst), src), "the wait meant a later recording"

    def test_a_wait_does_not_mean_a_later_recording(self, lab: Lab) -> None:
        first, second = lab.stream(), lab.stream()
        event = lab.backend.new_event()
        second.record_event(event)
        first.wait_event(event)
        # If the wait above meant this recording, the two streams would wait for one another.
        second.wait_event(first.record_event())
        second.record_event(event)
        lab.settle()
        assert event.query()

    def test_an_event_means_its_latest_recording_to_the_host(self, lab: Lab) -> None:
        idle, stream, event = lab.stream(), lab.stream(), lab.backend.new_event()
        for fill in range(1, 4):
            out, src = lab.host(64), lab.host(64, fill)
            idle.record_event(event)
            lab.busy(stream)
            lab.copy(stream, out, src)
            stream.record_event(event)
            event.synchronize()
            assert torch.equal(out, src), "the host waited for an earlier recording"

    def test_a_wait_holds_later_work_only(self, lab: Lab) -> None:
        first, second = lab.stream(), lab.stream()
        dst, src = lab.device(64), lab.host(64, 6)
        lab.copy(second, dst, src)
        before = second.record_event()
        event = lab.pending_event(first)
        second.wait_event(event)
        before.synchronize()
        assert torch.equal(lab.read(dst), src)

    def test_waiting_on_the_compute_stream_holds_the_host_as_declared(self, lab: Lab) -> None:
        def waited() -> bool:
            event = lab.pending_event(lab.stream())
            lab.backend.current_stream().wait_event(event)
            return event.query()

        if lab.backend.capabilities.host_blocks:
            assert waited(), "Capabilities.host_blocks is True, but a wait returned early"
        else:
            assert lab.once(lambda: not waited()), (
                "Capabilities.host_blocks is False, but each wait on the compute stream held the "
                "host"
            )

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_a_chain_over_three_streams_keeps_every_round_apart(
        self, lab: Lab, nbytes: int
    ) -> None:
        """Move each round's bytes in, across and out; nothing but events keeps rounds apart."""
        new_event = lab.backend.new_event
        enter, across, leave = lab.stream(), lab.stream(), lab.stream()
        first, second = lab.device(nbytes), lab.device(nbytes)
        sources = [lab.host(nbytes, seed) for seed in range(_ROUNDS)]
        outs = [lab.host(nbytes) for _ in sources]
        first_filled, first_drained = new_event(), new_event()
        second_filled, second_drained = new_event(), new_event()
        for number, (src, out) in enumerate(zip(sources, outs, strict=True)):
            # In turns each stream is the slow one.
            lab.busy((enter, across, leave)[number % 3], 6)
            enter.wait_event(first_drained)
            lab.copy(enter, first, src)
            enter.record_event(first_filled)
            across.wait_event(first_filled)
            across.wait_event(second_drained)
            lab.copy(across, second, first)
            across.record_event(first_drained)
            across.record_event(second_filled)
            leave.wait_event(second_filled)
            lab.copy(leave, out, second)
            leave.record_event(second_drained)
        lab.settle()
        for number, (src, out) in enumerate(zip(sources, outs, strict=True)):
            assert torch.equal(out, src), f"round {number} has bytes of another round"

    @pytest.mark.parametrize("nbytes", [3, (1 << 20) + 3])
    def test_copies_and_compute_take_turns_at_one_buffer(self, lab: Lab, nbytes: int) -> None:
        """Fill a buffer on a side stream and read it by compute, as dlo does with a slot."""
        stream, buffer = lab.stream(), lab.device(nbytes)
        filled, drained = lab.backend.new_event(), lab.backend.new_event()
        compute = lab.backend.current_stream()
        sources, seen = [lab.host(nbytes, seed) for seed in range(_ROUNDS)], []
        for src in sources:
            with lab.backend.stream(stream):
                stream.wait_event(drained)
                lab.backend.copy(buffer, src)
                stream.record_event(filled)
            lab.busy(stream, 3)
            compute.wait_event(filled)
            seen.append(buffer.clone())
            compute.record_event(drained)
        lab.settle()
        for number, (src, out) in enumerate(zip(sources, seen, strict=True)):
            assert torch.equal(out.cpu(), src), f"round {number} has bytes of another round"

    def test_times_between_events_add_up(self, lab: Lab) -> None:
        stream = lab.stream()
        events = [lab.backend.new_event(timing=True) for _ in range(3)]
        for event in events:
            stream.record_event(event)
            lab.busy(stream, 6)
        lab.settle()
        first, second, third = events
        parts = first.elapsed_time(second) + second.elapsed_time(third)
        assert first.elapsed_time(second) > 0
        assert first.elapsed_time(third) == pytest.approx(parts, abs=_CLOCK_MS)

    def test_times_are_milliseconds(self, lab: Lab) -> None:
        if not self.real_time:
            pytest.skip("a simulation has no clock")

        def attempt() -> bool:
            stream = lab.stream()
            start, end = (lab.backend.new_event(timing=True) for _ in range(2))
            lab.settle()
            began = time.perf_counter()
            stream.record_event(start)
            lab.busy(stream)
            stream.record_event(end)
            end.synchronize()
            host_ms = (time.perf_counter() - began) * 1e3
            return host_ms / 5 <= start.elapsed_time(end) <= host_ms + _CLOCK_MS

        lab.busy(lab.stream(), 3)
        assert lab.once(attempt), "elapsed_time() does not agree with the host's clock"

    def test_timing_events_work_on_the_compute_stream(self, lab: Lab) -> None:
        compute, stream = lab.backend.current_stream(), lab.stream()
        start, end = (lab.backend.new_event(timing=True) for _ in range(2))
        compute.record_event(start)
        compute.wait_event(lab.pending_event(stream))
        compute.record_event(end)
        lab.settle()
        end.synchronize()
        assert start.elapsed_time(end) >= 0
