"""The packed store: a host store of packed shards that is read and written as what they hold.

What travels are the bytes of the store inside; ``whole`` and ``write`` know the parts of the
blocks' runs.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dlo_core.coder import TooLongError
from dlo_core.errors import CheckpointError, UseError
from dlo_core.host import HostStore
from dlo_core.packed_cut import PackedCut, packed_tensors
from dlo_core.rawbytes import move_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlo_core.coder import Coder
    from dlo_core.feed import Feed, Part
    from dlo_core.host import HostBytes
    from dlo_core.interface import Backend
    from dlo_core.layout import BlockLayout
    from dlo_core.shard import ShardPlan

__all__ = ["PackedStore"]


class PackedStore(HostStore):
    """Packs what is written, block by block, and decodes what is read."""

    def __init__(
        self,
        inner: HostStore,
        coder: Coder,
        layouts: Sequence[BlockLayout],
        cuts: Sequence[ShardPlan | PackedCut],
        *,
        backend: Backend,
        rank: int,
    ) -> None:
        """Put the parts together.

        Args:
            inner: Holds the shards.
            coder: Packs and decodes.
            layouts: Of all blocks.
            cuts: How they are cut; those blocks that are not cut to be packed stay raw.
            backend: Copies.
            rank: In the shard group.
        """
        self._inner = inner
        self._coder = coder
        self._layouts = tuple(layouts)
        self._cuts = tuple(cuts)
        self._backend = backend
        self._rank = rank
        self._dirty: tuple[int, torch.Tensor] | None = None
        # What ``pack`` has written, and the block that it is writing.
        self._packed: list[int] = []
        self._torn: int | None = None
        self.nbytes = inner.nbytes
        self.tiers = inner.tiers
        self.part = inner.part

    @property
    def account(self) -> HostBytes:
        """The bytes by kind."""
        return self._inner.account

    @property
    def runs(self) -> tuple[torch.Tensor, ...]:
        """The memory, buffer by buffer."""
        return self._inner.runs

    def parts(self, index: int) -> tuple[Part, ...]:
        """Return the shard of block ``index`` as it travels."""
        nbytes = self._cuts[index].nbytes
        return tuple(
            (at, part[: nbytes - at]) for at, part in self._inner.parts(index) if at < nbytes
        )

    def whole(self, index: int) -> torch.Tensor:
        """Return this rank's part of the run of block ``index``, decoded.

        Raises:
            CheckpointError: The shard is damaged.
        """
        if self._dirty is not None and self._dirty[0] == index:
            return self._dirty[1]
        return self.decoded(index)

    def decoded(self, index: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the same, of what is in the shards.

        Args:
            index: The block.
            into: Host memory of the caller's, who lets the coder's memory go; None: new memory.

        Raises:
            CheckpointError: The shard is damaged.
        """
        if not isinstance(self._cuts[index], PackedCut):
            return self._inner.whole(index)
        row = self._inner.whole(index)[: self._cuts[index].nbytes]
        try:
            with self._named(index):
                return self._coder.decode(row, into)
        finally:
            if into is None:
                # What it borrowed is its owner's again.
                self._coder.release(host=False)

    def pack(self, index: int, run: torch.Tensor) -> None:
        """Pack this rank's part of the run of block ``index``, in whole chunks.

        Raises:
            UseError: It takes more bytes than there are.
        """
        cut = self._cuts[index]
        assert isinstance(cut, PackedCut)
        room = cut.nbytes - cut.trailer_nbytes
        tensors = packed_tensors(self._layouts[index], cut, self._rank)
        try:
            row = self._coder.encode(run, tensors, room)
        except TooLongError as error:
            raise UseError(
                f"the new values of block {self._layouts[index].name!r} take {error.nbytes:,} "
                f"bytes packed, and there is room for {room:,}: shutdown() and offload them, or "
                "use packed=False"
            ) from error
        self._torn = index
        for at, part in self._inner.parts(index):
            stop = min(at + part.nbytes, room)
            if at < stop:
                self._backend.copy(part[: stop - at], row[at:stop])
        self._backend.current_stream().synchronize()
        self._packed.append(index)
        # Last: see ``settle``.
        self._torn = None

    def settle(self) -> list[int]:
        """After ``pack`` was stopped: write back what it was given, if it had begun to write.

        Returns:
            The blocks that are packed.
        """
        torn, packed = self._torn, list(self._packed)
        if torn is not None:
            for at, part in self._inner.parts(torn):
                self._backend.copy(part, self._coder.uploaded(at + part.nbytes)[at:])
            self._backend.current_stream().synchronize()
            packed = [index for index in packed if index != torn]
        return packed

    def put(self, index: int, row: torch.Tensor) -> None:
        """Take the packed row of block ``index`` as it is, in host memory.

        Raises:
            CheckpointError: It is damaged.
        """
        with self._named(index):
            self._coder.check(row)
        for at, part in self._inner.parts(index):
            stop = min(at + part.nbytes, row.numel())
            if at < stop:
                move_bytes(part[: stop - at], row[at:stop])

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        """Let errors say which block it is."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"block {self._layouts[index].name!r}: {error}") from error

    def borrow_from(self, borrow: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Code in device buffers of somebody else's; see ``Coder.borrow_from``."""
        self._coder.borrow_from(borrow)

    def host_run(self, nbytes: int) -> torch.Tensor:
        """Return host memory for runs that ``pack`` is given, until ``rest``."""
        return self._coder.host_run(nbytes)

    def rest(self) -> None:
        """Let go of what only packing needs."""
        self._coder.release()

    def seal(self, index: int, trailer: bytes) -> None:
        """Write the trailer of block ``index``."""
        end = torch.frombuffer(bytearray(trailer), dtype=torch.uint8)
        self._inner.write(index, self._cuts[index].nbytes - len(trailer), end)

    def write(self, index: int, start: int, data: torch.Tensor) -> None:
        """Overwrite bytes of this rank's part of block ``index``; ``flush`` makes it so."""
        if self.part[0]:
            # Memory that the node's ranks have in common is written by the first of them, so it
            # may be changing.
            return
        if not isinstance(self._cuts[index], PackedCut):
            self._inner.write(index, start, data)
            return
        if self._dirty is None or self._dirty[0] != index:
            self.flush()
            self._dirty = index, self.whole(index)
        run = self._dirty[1]
        move_bytes(run[start : start + data.numel()], data)

    def flush(self) -> None:
        """Pack what was written.

        Raises:
            UseError: It takes more bytes than there are.
        """
        dirty, self._dirty = self._dirty, None
        try:
            if dirty is not None:
                self.pack(*dirty)
        finally:
            self._coder.release()

    def writing(self, index: int) -> Iterator[torch.Tensor]:  # type: ignore[override]
        """Refuse: packed shards are written through ``pack``.

        Raises:
            UseError: Always.
        """
        raise UseError(f"the shard of block {index} is packed; it is written as a whole")

    def feed(self) -> Feed:
        """Return how a transfer comes by the shards."""
        return self._inner.feed()

    def register(self) -> None:
        """Page-lock what is shared."""
        self._inner.register()

    def release(self) -> None:
        """Give everything back. Idempotent."""
        self._dirty = None
        self._coder.release()
        self._inner.release()
