"""Streams: torch's own, asked for what the engine asks for a block without the layers in between.

[Note: short ways]
For every block a few events are recorded and waited for, and the current stream is asked for.
``torch.cuda`` does each by three to five functions of Python around one of the driver, and together
they take longer than the driver. Here the innermost one is called. The streams are torch's: equal
to them, usable in their place, from the same pool. A torch that names the innermost otherwise is
asked by its outermost.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Current", "StreamOfDlo", "Streams"]


def _get_by_name(index: int) -> tuple[int, int, int]:
    stream: Any = torch.cuda.current_stream(index)
    return stream.stream_id, stream.device_index, stream.device_type


def _set_by_name(number: int, device: int, kind: int) -> None:
    torch.cuda.set_stream(_stream(stream_id=number, device_index=device, device_type=kind))


_event: Any = torch.cuda.Event.__base__
_record: Any = getattr(_event, "record", torch.cuda.Event.record)
_wait: Any = getattr(_event, "wait", torch.cuda.Event.wait)
_get_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", _get_by_name)
_set_stream: Any = getattr(torch._C, "_cuda_setStream", _set_by_name)
_get_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class StreamOfDlo(torch.cuda.Stream):
    """One of torch's streams, with short ways to its events."""

    def wait_event(self, event: Any) -> None:
        """Let all work that is queued from now on wait for ``event``."""
        _wait(event, self)

    def record_event(self, event: Any = None) -> Any:
        """Record ``event``, by default a new one, after all work that is queued so far."""
        if event is None:
            event = torch.cuda.Event()
        _record(event, self)
        return event


_stream: Any = StreamOfDlo


class Current:
    """Makes a stream of the current device current, and what was current before again."""

    __slots__ = ("_before", "_index", "_stream")

    def __init__(self, index: int, stream: tuple[int, int, int]) -> None:
        """Take what torch knows the stream by.

        Args:
            index: Of the device.
            stream: Number of the stream, of its device and of the device's type.
        """
        self._index = index
        self._stream = stream

    def __enter__(self) -> None:
        """Make the stream current."""
        self._before = _get_stream(self._index)
        _set_stream(*self._stream)

    def __exit__(self, *exc: object) -> None:
        """Make current what was current before."""
        _set_stream(*self._before)


class Streams:
    """The streams of one device that were met so far."""

    def __init__(self, index: int) -> None:
        """Know none.

        Args:
            index: Of the device.
        """
        self._index = index
        self._met: dict[tuple[int, int, int], StreamOfDlo] = {}

    def new(self, priority: int) -> StreamOfDlo:
        """Return a stream of torch's pool."""
        made: Any = _stream(device=self._index, priority=priority)
        return self._met.setdefault((made.stream_id, made.device_index, made.device_type), made)

    def current(self) -> StreamOfDlo:
        """Return the current stream of this thread; the same object each time."""
        found = _get_stream(self._index)
        met = self._met.get(found)
        return self._meet(*found) if met is None else met

    def _meet(self, number: int, device: int, kind: int) -> StreamOfDlo:
        made: StreamOfDlo = _stream(stream_id=number, device_index=device, device_type=kind)
        return self._met.setdefault((number, device, kind), made)

    def made_current(self, stream: Any) -> Any:
        """Return the context in which ``stream``, one of this device, is current."""
        if _get_device() != self._index:
            # torch's own puts two devices' streams back, which takes longer.
            return torch.cuda.stream(stream)
        return Current(self._index, (stream.stream_id, stream.device_index, stream.device_type))
