"""Faulty backends: each breaks one promise of the interface, in a class of the conformance suite.

Not collected with the tests, for the classes must fail; ``test_conformance_faults.py`` runs them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from faulty_parts import FaultyAllocator, LyingBuffer

from dlo_core import cpu_stream
from dlo_core.cpu import CpuBackend, CpuCheck, CpuCodec
from dlo_core.cpu_stream import CpuEvent, CpuStream, HostStream, current_stream
from dlo_core.interface import Capabilities
from dlo_core.packed_torch import TorchCodec
from dlo_core.rawbytes import bytes_of
from dlo_core.testing.conformance import BackendConformance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlo_core.interface import Backend


class Faulty(BackendConformance):
    """The suite on a backend of a class."""

    kind: type[CpuBackend] = CpuBackend

    @pytest.fixture
    def backend(self) -> Backend:
        return self.kind()


# --- streams and events ---------------------------------------------------------------------------


class DeafStream(CpuStream):
    def wait_event(self, event: CpuEvent) -> None:
        """Wait for nothing."""


class DeafHost(HostStream):
    def wait_event(self, event: CpuEvent) -> None:
        """Wait for nothing."""


class LatestStream(CpuStream):
    def wait_event(self, event: CpuEvent) -> None:
        """Wait for the recording that the event has when the stream comes to it."""
        self.run(event.synchronize)


class ForgetfulStream(CpuStream):
    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Keep the first recording."""
        if event is not None and event._ticket is not None:
            return event
        return super().record_event(event)


class HastyStream(CpuStream):
    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Reach the event at once."""
        return HostStream().record_event(event)


class WithStream(CpuBackend):
    stream_kind: type[CpuStream]

    def new_stream(self, priority: int = 0) -> CpuStream:
        stream = self.stream_kind("faulty")
        self._streams.add(stream)
        return stream


def with_stream(kind: type[CpuStream]) -> type[CpuBackend]:
    return type("WithStream", (WithStream,), {"stream_kind": kind})


class TestWaitThatDoesNothing(Faulty):
    kind = with_stream(DeafStream)


class TestWaitForTheLatestRecording(Faulty):
    kind = with_stream(LatestStream)


class TestEventThatKeepsItsFirstRecording(Faulty):
    kind = with_stream(ForgetfulStream)


class TestEventThatIsReachedAtOnce(Faulty):
    kind = with_stream(HastyStream)


class ComputeThatDoesNotWait(CpuBackend):
    def current_stream(self) -> CpuStream | HostStream:
        stream = super().current_stream()
        return stream if isinstance(stream, CpuStream) else self.deaf

    deaf = DeafHost()


class TestComputeThatDoesNotWait(Faulty):
    kind = ComputeThatDoesNotWait


class ContextThatStays(CpuBackend):
    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = current_stream()
        cpu_stream._current.stream = stream
        yield
        cpu_stream._current.stream = before


class TestContextThatStaysAfterAnException(Faulty):
    kind = ContextThatStays

    @pytest.fixture(autouse=True)
    def spare_the_others(self) -> Iterator[None]:
        """Undo what the fault does to this thread."""
        yield
        vars(cpu_stream._current).clear()


class ContextOfAllThreads(CpuBackend):
    shared: Any = None

    def current_stream(self) -> Any:
        return self.shared or super().current_stream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.shared = self.shared, stream
        try:
            with super().stream(stream):
                yield
        finally:
            self.shared = before


class TestContextOfAllThreads(Faulty):
    kind = ContextOfAllThreads


class SecondsEvent(CpuEvent):
    def elapsed_time(self, end_event: CpuEvent) -> float:
        return super().elapsed_time(end_event) / 1e3


class TimesInSeconds(CpuBackend):
    def new_event(self, *, timing: bool = False) -> CpuEvent:
        return SecondsEvent()


class TestTimesInSeconds(Faulty):
    kind = TimesInSeconds


# --- copies and device memory ---------------------------------------------------------------------


class CopyOfOneRun(CpuBackend):
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Move as many bytes from the first on, whatever the strides are."""
        n = dst.numel()
        current_stream().run(lambda: bytes_of(dst, n).copy_(bytes_of(src, n)))


class TestCopyThatIgnoresStrides(Faulty):
    kind = CopyOfOneRun


class CopyAtOnce(CpuBackend):
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy before the stream's turn."""
        dst.copy_(src)


class TestCopyAtOnce(Faulty):
    kind = CopyAtOnce


class CopyOfWholeWords(CpuBackend):
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Drop what is left over of the last eight bytes."""
        n = len(dst) // 8 * 8 if dst.ndim == 1 else len(dst)
        super().copy(dst[:n], src[:n])


class TestCopyOfWholeWords(Faulty):
    kind = CopyOfWholeWords


class UncountedMemory(CpuBackend):
    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)


class TestUncountedMemory(Faulty):
    kind = UncountedMemory


class InferenceMemory(CpuBackend):
    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class TestInferenceMemory(Faulty):
    kind = InferenceMemory


# --- capabilities ---------------------------------------------------------------------------------


class SaysPinned(CpuBackend):
    capabilities = Capabilities(host_blocks=True, pinned_memory=True)


class TestDeclaresPinnedMemory(Faulty):
    kind = SaysPinned


class SaysNotPinned(CpuBackend):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = FaultyAllocator(LyingBuffer)


class TestDeniesPinnedMemory(Faulty):
    kind = SaysNotPinned


class DeclaresRegistration(CpuBackend):
    capabilities = Capabilities(host_blocks=True, host_registration=True)


class TestDeclaresRegistration(Faulty):
    kind = DeclaresRegistration


class SaysNotBlocking(CpuBackend):
    capabilities = Capabilities(host_blocks=False)


class TestDeniesBlocking(Faulty):
    kind = SaysNotBlocking


class TestLimitThatIsNone(Faulty):
    known_limits = {"test_a_priority_is_accepted": "planted: it passes"}  # noqa: RUF012


# --- checks and errors ----------------------------------------------------------------------------


class LatestCheck(CpuCheck):
    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        def work() -> None:
            self._failed = not torch.equal(actual, expected)

        current_stream().run(work)


class WaitingCheck(CpuCheck):
    last: Any = None

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        super().compare(actual, expected)
        self.last = current_stream().record_event()

    def failed(self) -> bool:
        if self.last is not None:
            self.last.synchronize()
        return super().failed()


class CheckThatForgets(CpuBackend):
    def new_check(self) -> CpuCheck:
        return LatestCheck()


class TestCheckThatForgets(Faulty):
    kind = CheckThatForgets


class CheckThatWaits(CpuBackend):
    def new_check(self) -> CpuCheck:
        return WaitingCheck()


class TestCheckThatWaits(Faulty):
    kind = CheckThatWaits


class EarlyCodec(CpuCodec):
    """Decodes at once, whatever the stream has still to do."""

    def decode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        TorchCodec.decode(self, rows, out)


class CodecAtOnce(CpuBackend):
    def codec(self) -> CpuCodec:
        return EarlyCodec()


class TestCodecAtOnce(Faulty):
    kind = CodecAtOnce


class RoundingCodec(CpuCodec):
    """Makes every NaN the same, before it packs."""

    def write(self, run: torch.Tensor, ranks: torch.Tensor, row: torch.Tensor) -> None:
        values = run.clone().view(torch.bfloat16)
        values[values.isnan()] = float("nan")
        super().write(values.view(torch.uint8), ranks, row)


class CodecThatRounds(CpuBackend):
    def codec(self) -> CpuCodec:
        return RoundingCodec()


class TestCodecThatRounds(Faulty):
    kind = CodecThatRounds


class SwallowsErrors(CpuBackend):
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        def work() -> None:
            if dst.shape == src.shape:
                dst.copy_(src)

        current_stream().run(work)


class TestErrorThatIsLost(Faulty):
    kind = SwallowsErrors
