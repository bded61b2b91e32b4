"""Streams: the current stream and the switch to another, at the price of torch's own calls.

torch_npu makes a new Python object for every look at the current stream (7 µs) and looks at it
twice a switch (16 µs); torch's accelerator interface tells the number of the stream in 1 µs, and
the object that belongs to it is kept.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["StreamTable", "Switch"]


class StreamTable:
    """The stream objects of one device, by their numbers."""

    def __init__(self, module: Any, device: torch.device) -> None:
        """Begin with none.

        Args:
            module: ``torch.npu``.
            device: Whose streams are kept.
        """
        self._module = module
        self._device = device
        self._known: dict[int, Any] = {}

    def current(self) -> Any:
        """Return this thread's current stream."""
        now = torch.accelerator.current_stream(self._device)
        known = self._known.get(now.stream_id)
        if known is None:
            known = self._known[now.stream_id] = self._module.Stream(
                stream_id=now.stream_id,
                device_index=now.device_index,
                device_type=now.device_type,
            )
        return known


class Switch:
    """A context in which another stream is current; every entry is a switch of its own."""

    __slots__ = ("_before", "_index", "_stream", "_table")

    def __init__(self, table: StreamTable, stream: Any) -> None:
        """Change nothing yet.

        Args:
            table: Tells what is current.
            stream: What is to be current.
        """
        self._table = table
        self._stream = stream
        self._before: Any = None
        self._index = 0

    def __enter__(self) -> None:
        """Make the stream current in this thread."""
        self._index = torch.accelerator.current_device_index()
        self._before = self._table.current()
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        """Make current what was before: the stream, and the device, which torch switches too."""
        torch.accelerator.set_stream(self._before)
        if self._index != self._before.device_index:
            torch.accelerator.set_device_index(self._index)
