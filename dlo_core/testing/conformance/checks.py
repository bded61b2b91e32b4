"""Checks and errors: what queued work found, and what went wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core.testing.conformance.base import BackendSuite

if TYPE_CHECKING:
    from dlo_core.interface import Event, Stream
    from dlo_core.testing.conformance.lab import Lab

__all__ = ["CheckConformance"]


class CheckConformance(BackendSuite):
    """What the interface promises of ``Check``, and of work that cannot be done."""

    def test_a_check_is_silent_about_equal_bytes(self, lab: Lab) -> None:
        for nbytes in (0, 1, 16, 4097):
            check = lab.backend.new_check()
            check.compare(lab.device(nbytes, 1), lab.device(nbytes, 1))
            lab.settle()
            assert check.failed() is False

    @pytest.mark.parametrize("at", [0, 15, 63])
    def test_a_check_finds_one_different_byte(self, lab: Lab, at: int) -> None:
        check, actual, expected = lab.backend.new_check(), lab.device(64, 1), lab.device(64, 1)
        actual[at] ^= 0x40
        check.compare(actual, expected)
        lab.settle()
        assert check.failed() is True

    def test_a_check_does_not_forget(self, lab: Lab) -> None:
        check, one, other = lab.backend.new_check(), lab.device(64, 1), lab.device(64, 2)
        check.compare(one, one)
        check.compare(one, other)
        for _ in range(3):
            check.compare(one, one)
            lab.settle()
            assert check.failed() is True, "a later comparison of equal bytes hid the difference"

    def test_checks_are_apart_from_each_other(self, lab: Lab) -> None:
        good, bad = lab.backend.new_check(), lab.backend.new_check()
        one, other = lab.device(64, 1), lab.device(64, 2)
        bad.compare(one, other)
        good.compare(one, one)
        lab.settle()
        assert bad.failed()
        assert not good.failed()

    def test_a_check_compares_rows_of_a_larger_buffer(self, lab: Lab) -> None:
        """Compare strided rows with dense ones, as dlo compares the ends of the shards."""
        actual, expected = lab.device(4 * 256), lab.device(4 * 16, 3).view(4, 16)
        rows = actual.view(4, 256)[:, 240:]
        rows.copy_(expected)
        lab.settle()
        check = lab.backend.new_check()
        check.compare(rows, expected)
        lab.settle()
        assert not check.failed()
        actual[3 * 256 + 255] ^= 1
        check.compare(rows, expected)
        lab.settle()
        assert check.failed()

    @pytest.mark.parametrize("late", ["equal", "different"])
    def test_a_check_compares_in_its_stream_turn(self, lab: Lab, late: str) -> None:
        """Compare bytes that arrive only when earlier work of the stream is done."""
        stream, check = lab.stream(), lab.backend.new_check()
        actual = lab.device(64, 2 if late == "equal" else 1)
        src, expected = lab.host(64, 1 if late == "equal" else 2), lab.device(64, 1)
        lab.busy(stream)
        with lab.backend.stream(stream):
            lab.backend.copy(actual, src)
            check.compare(actual, expected)
        lab.settle()
        assert check.failed() == (late == "different")

    def test_asking_a_check_never_waits(self, lab: Lab) -> None:
        one, other = lab.device(64, 1), lab.device(64, 2)

        def attempt() -> bool:
            stream, check = lab.stream(), lab.backend.new_check()
            lab.busy(stream)
            with lab.backend.stream(stream):
                check.compare(one, other)
            done = stream.record_event()
            early = check.failed()
            pending = not done.query()
            lab.settle()
            assert check.failed()
            return pending and not early

        assert lab.once(attempt), "failed() waited for the comparison"

    def test_a_check_works_under_inference_mode(self, lab: Lab) -> None:
        with torch.inference_mode():
            check, one, other = lab.backend.new_check(), lab.device(64, 1), lab.device(64, 2)
            check.compare(one, one)
            lab.settle()
            assert not check.failed()
        check.compare(one, other)
        lab.settle()
        assert check.failed()

    def test_work_that_cannot_be_done_is_an_error_for_whoever_waits(self, lab: Lab) -> None:
        lab.expects_errors = True
        dst, src, stream = lab.backend.empty(4), lab.host(5, 1), lab.stream()
        try:
            lab.copy(stream, dst, src)
            # Refused at once, which is as good.
        except Exception:
            return
        event = stream.record_event()
        assert_raises_on_wait(event)
        # Not forgotten, and handed on to whoever waits for work behind it.
        assert_raises_on_wait(event)
        assert_raises_on_wait(behind(lab.stream(), event))
        if lab.backend.capabilities.host_blocks:
            with pytest.raises(Exception):  # noqa: B017, PT011 - a backend raises what it has
                lab.backend.current_stream().wait_event(event)

    def test_an_error_leaves_other_streams_alone(self, lab: Lab) -> None:
        lab.expects_errors = True
        broken, sound = lab.stream(), lab.stream()
        dst, src = lab.device(64), lab.host(64, 1)
        with pytest.raises(Exception):  # noqa: B017, PT011, PT012 - a backend raises what it has
            lab.copy(broken, lab.backend.empty(4), lab.host(5, 1))
            broken.synchronize()
        lab.copy(sound, dst, src)
        sound.synchronize()
        assert torch.equal(dst.cpu(), src)


def behind(stream: Stream, event: Event) -> Event:
    """Return an event of ``stream`` that comes after ``event``."""
    stream.wait_event(event)
    made: Event = stream.record_event()
    return made


def assert_raises_on_wait(event: Event) -> None:
    """Wait, and want an error."""
    try:
        event.synchronize()
    except Exception:
        return
    pytest.fail("work failed on a stream, and whoever waited for it was not told")
