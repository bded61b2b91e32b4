"""The coder: packs and decodes runs of host memory on the device, one at a time.

It is for loading and for values that change, never for the hot path: it waits for the device.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from dlo_core.errors import CheckpointError, DloError, HostMemoryError
from dlo_core.packed import check_segment, decode_segment, measure, write_segment
from dlo_core.packed_format import CHUNK_NBYTES
from dlo_core.packed_torch import TorchCodec
from dlo_core.pages import PageableAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlo_core.interface import Backend, Codec, HostBuffer
    from dlo_core.packed import Index

__all__ = ["Coder", "TooLongError", "codec_of"]

_logger = logging.getLogger("dlo")
_PIECE_NBYTES = 1 << 24


def codec_of(backend: Backend) -> Codec:
    """Return a backend's own codec, or the one in torch's operations."""
    return backend.codec() or TorchCodec()


class TooLongError(Exception):
    """Raised when a segment does not fit.

    Attributes:
        nbytes: Bytes that it takes.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"{nbytes:,} bytes")
        self.nbytes = nbytes


class Coder:
    """Codes on one device; its memory there is that of the largest run so far."""

    def __init__(self, backend: Backend, *, verify: bool) -> None:
        """Take the device.

        Args:
            backend: Of the device.
            verify: Whether everything that is packed is decoded again and compared.
        """
        self._backend = backend
        self._verify = verify
        self._scratch: dict[str, torch.Tensor] = {}
        self._lent: list[torch.Tensor] = []
        self._borrow: Callable[[], Sequence[torch.Tensor]] | None = None
        self._borrowed = False
        self._host: HostBuffer | None = None

    @cached_property
    def _codec(self) -> Codec:
        # Late: it may take a second to load, and a choice may never want it.
        return codec_of(self._backend)

    def borrow_from(self, borrow: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Use device buffers of somebody else's before any is allocated; until ``release``.

        Args:
            borrow: Returns them, free to be written; called when memory is wanted first.
        """
        self._borrow = borrow

    def lend(self, buffer: torch.Tensor) -> None:
        """Let coding use this device buffer, too; until ``release``."""
        self._lent.append(buffer)

    def uploaded(self, nbytes: int) -> torch.Tensor:
        """Return the first bytes of the run that ``encode`` was given last, on the device."""
        return self._scratch["run"][:nbytes]

    def measure(self, run: torch.Tensor, tensors: Sequence[tuple[int, int]]) -> int:
        """Return the bytes that a host run of whole chunks takes when it is packed."""
        with torch.inference_mode(False), torch.no_grad():
            return self._measure(self._upload("run", run), tensors).header.nbytes

    def encode(
        self, run: torch.Tensor, tensors: Sequence[tuple[int, int]], nbytes: int
    ) -> torch.Tensor:
        """Return a device row of ``nbytes`` bytes that begins with the segment of a host run.

        It is lost by the next call.

        Raises:
            TooLongError: The segment has more bytes.
            DloError: It does not come out as it went in.
        """
        with torch.inference_mode(False), torch.no_grad():
            data = self._upload("run", run)
            index = self._measure(data, tensors)
            if index.header.nbytes > nbytes:
                raise TooLongError(index.header.nbytes)
            row = self._take("row", nbytes)
            write_segment(self._codec, data, index, row)
            if self._verify:
                again = self._take("again", data.nbytes)
                decode_segment(self._codec, row, again)
                # A decoder of a side stream would be late; this is no hot path.
                self._backend.synchronize()
                if not _equal(again, data):
                    raise DloError(
                        "packed weights do not come out as they went in: a fault of dlo or of the "
                        "device; use packed=False, and please report it"
                    )
            return row

    def reserve(self, run_nbytes: int, row_nbytes: int, *, packs: bool) -> None:
        """Take the memory for runs and rows of at most these sizes.

        Args:
            run_nbytes: Bytes of a run.
            row_nbytes: Bytes of a row.
            packs: Whether it is for ``encode``; False: for ``decode``.

        Raises:
            RuntimeError: The device has not so much.
        """
        self._take("run", run_nbytes)
        self._take("row", row_nbytes)
        if packs and self._verify:
            self._take("again", run_nbytes)

    def check(self, row: torch.Tensor) -> None:
        """Decode a host row and compare its checksums, where what is packed is to be verified.

        Raises:
            CheckpointError: It is damaged.
        """
        header = check_segment(row)
        if self._verify:
            with torch.inference_mode(False), torch.no_grad():
                out = self._take("run", header.num_chunks * CHUNK_NBYTES)
                decode_segment(self._codec, self._upload("row", row), out)

    def trial(self, run: torch.Tensor, tensors: Sequence[tuple[int, int]]) -> tuple[int, float]:
        """Return the bytes that a host run takes packed, and the milliseconds of decoding it."""
        with torch.inference_mode(False), torch.no_grad():
            data = self._upload("run", run)
            index = self._measure(data, tensors)
            # As long as a decoder may look.
            row = self._take("row", -(-index.header.nbytes // 256) * 256)
            write_segment(self._codec, data, index, row)
            stream = self._backend.current_stream()
            least = float("inf")
            # The first time kernels are compiled.
            for _ in range(4):
                start, end = (self._backend.new_event(timing=True) for _ in range(2))
                start.record(stream)
                self._codec.decode(row.view(1, -1), data)
                end.record(stream)
                end.synchronize()
                least = min(least, start.elapsed_time(end))
            return index.header.nbytes, least

    def decode(self, row: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the run that a host row holds, in host memory.

        Where the device cannot, the host does it, which is slow: the weights must not be lost with
        the device.

        Args:
            row: Begins with the segment.
            into: Memory for the run; None, or less than it takes: it gets memory of its own.

        Raises:
            CheckpointError: The row is damaged.
        """
        with torch.inference_mode(False), torch.no_grad():
            header = check_segment(row)
            nbytes = header.num_chunks * CHUNK_NBYTES
            if into is None or into.nbytes < nbytes:
                into = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            run = into[:nbytes]
            try:
                out = self._take("run", nbytes)
                decode_segment(self._codec, self._upload("row", row), out)
                self._backend.copy(run, out)
                self._backend.current_stream().synchronize()
            except CheckpointError:
                raise
            # Whatever the device says of it.
            except Exception as error:
                _logger.warning("packed weights are decoded on the host, slowly: %s", error)
                decode_segment(TorchCodec(), row, run)
            return run

    def host_run(self, nbytes: int) -> torch.Tensor:
        """Return host memory for runs, from which the device copies fast; until ``release``."""
        if self._host is not None and self._host.tensor.nbytes < nbytes:
            self._host.release()
            self._host = None
        if self._host is None:
            try:
                self._host = self._backend.allocator.allocate(nbytes)
            except HostMemoryError:
                # It is for a moment and for speed only.
                self._host = PageableAllocator().allocate(nbytes)
        return self._host.tensor[:nbytes]

    def release(self, *, host: bool = True) -> None:
        """Let all memory go, of the host, too, unless told otherwise. Idempotent."""
        lent, self._lent, self._borrowed = self._lent, [], False
        self._scratch.clear()
        if lent:
            # Its owner writes it next, on any stream; one of a lost device nobody does.
            with suppress(Exception):
                self._backend.current_stream().synchronize()
        if host and self._host is not None:
            held, self._host = self._host, None
            held.release()

    def _measure(self, data: torch.Tensor, tensors: Sequence[tuple[int, int]]) -> Index:
        return measure(self._codec, data, data.nbytes, tensors)

    def _upload(self, name: str, run: torch.Tensor) -> torch.Tensor:
        data = self._take(name, run.nbytes)
        self._backend.copy(data, run)
        self._backend.current_stream().synchronize()
        return data

    def _take(self, name: str, nbytes: int) -> torch.Tensor:
        held = self._scratch.get(name)
        if held is None or held.nbytes < nbytes:
            # The old memory first: both at once may not be had.
            held = None
            self._scratch.pop(name, None)
            if self._borrow is not None and not self._borrowed:
                self._borrowed = True
                self._lent += self._borrow()
            held = self._lent_of(nbytes)
            held = self._scratch[name] = self._backend.empty(nbytes) if held is None else held
        return held[:nbytes]

    def _lent_of(self, nbytes: int) -> torch.Tensor | None:
        """Return the smallest buffer that was lent, is not used, and has so many bytes."""
        used = {id(held) for held in self._scratch.values()}
        fits = [each for each in self._lent if id(each) not in used and each.nbytes >= nbytes]
        return min(fits, key=lambda each: each.nbytes, default=None)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare in pieces: a comparison takes as much memory as it compares."""
    pieces = zip(first.split(_PIECE_NBYTES), second.split(_PIECE_NBYTES), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pieces)
