"""The streamer: when blocks are filled, bound and given back around the user's forward."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from dlo_core.compiling import OUTSIDE, aside
from dlo_core.errors import DloError, FillError, FillTimeout, UseError
from dlo_core.feed import FeedError
from dlo_core.residents import MIXED

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from dlo_core.binding import BlockBinding
    from dlo_core.interface import Event
    from dlo_core.residents import ResidentBlocks
    from dlo_core.slots import Pool, Slot
    from dlo_core.tape import Tape
    from dlo_core.transfer import Transfer

__all__ = ["Streamer"]


class Streamer:
    """Wraps the calls of one model and of its blocks."""

    def __init__(
        self,
        *,
        names: Sequence[str],
        bindings: Sequence[BlockBinding],
        first_block: int,
        tape: Tape,
        residents: ResidentBlocks,
        transfer: Transfer,
        pool: Pool,
        pass_start: Event,
        rank: int,
        before_pass: Callable[[Streamer], object] = lambda _: None,
    ) -> None:
        """Put the parts together.

        Args:
            names: Dotted names of the blocks.
            bindings: One a block.
            first_block: Number of the model's first block among those of the transfer.
            tape: The model's cursor; its block numbers are the transfer's.
            residents: The blocks that stay, which are not on the tape.
            transfer: Queues fills.
            pool: The slots.
            pass_start: A timing event.
            rank: In the shard group, for errors.
            before_pass: Called between two passes of the model.
        """
        self.names = tuple(names)
        self.bindings = tuple(bindings)
        self.first_block = first_block
        self.tape = tape
        self.residents = residents
        self.pass_start = pass_start
        self.last_waited: tuple[int, ...] = ()
        self.last_loaded: frozenset[int] = frozenset()
        self.on_pass: Callable[[], object] | None = None
        self._transfer = transfer
        self._pool = pool
        self._rank = rank
        self._before_pass = before_pass
        self._waited: dict[int, None] = {}
        self._loaded: set[int] = set()
        self._depth = [0] * len(self.names)
        self._closed: str | None = None
        self._captures = False

    def call_root(
        self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the model's own call as one pass."""
        if is_dynamo_compiling():
            torch._dynamo.skip_frame(msg=OUTSIDE)
        self._enter()
        try:
            self._check_grad(args, kwargs)
            self.begin_pass()
            try:
                return inner(*args, **kwargs)
            finally:
                self.end_pass()
        finally:
            self.leave()

    def call(
        self,
        block: int,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one block's own call with its weights bound."""
        if is_dynamo_compiling():
            torch._dynamo.skip_frame(msg=OUTSIDE)
        self._enter()
        try:
            slot = self._before(block, args, kwargs)
            try:
                out = inner(*args, **kwargs)
            except BaseException:
                self._after(block, slot, raised=True)
                raise
            self._after(block, slot)
            return out
        finally:
            self.leave()

    @aside
    def begin_pass(self) -> None:
        """Open a pass; the caller holds the pool's lock."""
        self._check_graph()
        if self.on_pass is not None:
            self.on_pass()
        self._guard(self._before_pass, self)
        self._guard(self.tape.begin_pass)
        self._waited = {}
        self._loaded = set()
        self._transfer.mark(self.pass_start)

    @aside
    def end_pass(self) -> None:
        """Close the pass, unless the offload failed: then there is nothing to wait for."""
        self.last_waited = tuple(self._waited)
        self.last_loaded = frozenset(self._loaded)
        if self._pool.failure is None and self._closed is None:
            self._guard(self.tape.end_pass)

    @contextmanager
    def instead(
        self, tape: Tape, transfer: Transfer, pool: Pool, pass_start: Event
    ) -> Iterator[None]:
        """Run the passes inside over other parts, and tell nobody; the caller holds the pool.

        Args:
            tape: The cursor.
            transfer: Queues fills.
            pool: The slots, over the same buffers.
            pass_start: Recorded where a pass begins.
        """
        kept = self.tape, self._transfer, self._pool, self.pass_start
        waited, loaded, on_pass = self.last_waited, self.last_loaded, self.on_pass
        self.tape, self._transfer, self._pool, self.pass_start = tape, transfer, pool, pass_start
        self.on_pass, self._captures = None, True
        try:
            yield
        finally:
            self._captures = False
            self.tape, self._transfer, self._pool, self.pass_start = kept
            self.last_waited, self.last_loaded, self.on_pass = waited, loaded, on_pass

    def get_ready(self) -> None:
        """Have the slots hold what a pass begins with; the caller holds the pool.

        Raises:
            FillError: A fill could not be queued; the offload is closed.
            UseError: Somebody else's graph is being recorded.
        """
        self._check_graph()
        self._guard(self.tape.ready)

    def _check_graph(self) -> None:
        if self._transfer.recorded and not self._captures:
            raise UseError(
                "an offloaded model was called while a graph is captured: its pass begins and ends "
                "in the middle of a copy on a stream of dlo's own, which the graph knows nothing "
                "of; use offloaded.capture(model, ...)"
            )

    def run_pass(self) -> _Pass:
        """Return a context that is one pass, for engines that do not call the root."""
        return _Pass(self)

    def close(self, reason: str) -> None:
        """Refuse every later call with ``reason``."""
        self._closed = self._closed or reason
        for binding in self.bindings:
            binding.close(reason)

    def check_usable(self) -> None:
        """Raise when the offload has failed, was shut down, or its weights are half updated.

        Raises:
            UseError: It has.
        """
        self._check_alive()
        self.check_whole()

    def check_whole(self) -> None:
        """Raise when the weights are half updated.

        Raises:
            UseError: They are.
        """
        torn = self._pool.torn
        if torn:
            raise UseError(
                f"update_weights() failed half-way, so {len(torn)} tensors may be old or new, "
                f"{next(iter(torn.values()))!r} among them; call update_weights() again with all "
                "that it was given, or shutdown() and offload again"
            )

    def _check_alive(self) -> None:
        if self._closed is not None:
            raise UseError(f"the model cannot be used: {self._closed}")
        if self._pool.failure is not None:
            raise UseError(
                f"the offload failed earlier and is closed ({self._pool.failure!r}); call "
                "shutdown() and "
                "offload again"
            ) from self._pool.failure

    def enter(self, *, repair: bool = False) -> None:
        """Take the pool for this thread; to ``repair`` weights that are half updated, too.

        Raises:
            UseError: Another thread is inside, or the offload is closed.
        """
        self._enter(self._check_alive if repair else self.check_usable)

    @aside
    def leave(self) -> None:
        """Give the pool back."""
        self._pool.lock.release()

    def step(self, turn: Generator[tuple[int, Slot], None, None]) -> tuple[int, Slot] | None:
        """Return the next block and slot of a turn of the tape, or None at its end.

        Raises:
            FillError: A fill could not be queued; the offload is closed.
        """
        found: tuple[int, Slot] | None = self._guard(next, turn, None)
        return found

    def end(self, turn: Generator[tuple[int, Slot], None, None]) -> None:
        """End a turn of the tape early: the fills that are left are made.

        Raises:
            FillError: A fill could not be queued; the offload is closed.
        """
        self._guard(turn.close)

    def stand_still(self) -> None:
        """Block the host until nothing reads or writes weights any more; between passes.

        Raises:
            FillError: A transfer went wrong; the offload is closed.
        """
        self._guard(self._transfer.stand_still)

    def guarded(self, do: Callable[..., Any], *args: Any) -> None:
        """Call ``do(*args)``, which queues transfers or waits for some.

        Raises:
            UseError: It raised one; nothing is closed.
            FillError: Something else went wrong; the offload is closed.
        """
        self._guard(do, *args)

    def wait_for(self, slot: Slot, block: int) -> None:
        """Let the current stream wait until ``block`` is in ``slot``.

        Raises:
            FillError: It did not come; the offload is closed.
        """
        number = self.first_block + block
        if not slot.stays:
            self._guard(self._transfer.acquire, slot, number, block=block, fill=slot.fill)
        elif (
            self._guard(self._transfer.acquire_resident, slot, number, block=block)
            and self.residents.on_the_way
        ):
            self._loaded.add(number)

    def check(self, slot: Slot, block: int) -> None:
        """Refuse a slot that is known by now to hold other bytes than ``block``'s; never waits.

        Raises:
            FillError: It does; the offload is closed.
        """
        if slot.check.failed():
            self._fail(f"it holds {MIXED}", block, slot.fill)

    @aside
    def _enter(self, check: Callable[[], None] | None = None) -> None:
        if not self._pool.lock.acquire(blocking=False):
            raise UseError(
                "busy: another thread is inside the model (or one that shares its slots); an "
                "offloaded "
                "model runs one forward at a time: use a lock or one offload a thread"
            )
        try:
            (check or self.check_usable)()
        except BaseException:
            self._pool.lock.release()
            raise

    @aside
    def _before(self, block: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Slot:
        self._check_grad(args, kwargs)
        number = self.first_block + block
        slot: Slot = self._guard(self._find, number, block=block)
        try:
            self.wait_for(slot, block)
            try:
                self.check(slot, block)
                # A block that calls itself is bound already.
                if not self._depth[block]:
                    self.bindings[block].bind(self._transfer.home(slot))
            except BaseException:
                self._transfer.release(slot, number)
                raise
        except BaseException:
            self.tape.after(slot)
            raise
        self._depth[block] += 1
        self._waited[number] = None
        return slot

    def _find(self, number: int) -> Slot:
        """Return the slot that has a block, or will have when the current stream has waited."""
        slot = self._pool.residents.get(number)
        if slot is None:
            return self.tape.before(number)
        if not self.tape.open:
            self.tape.begin_pass()
        slot.bound += 1
        return slot

    @aside
    def _after(self, block: int, slot: Slot, *, raised: bool = False) -> None:
        self._depth[block] -= 1
        try:
            if not self._depth[block]:
                self.bindings[block].unbind(self._transfer.home(slot), raised=raised)
        finally:
            self.tape.after(slot)
            # Shut down from inside of the block: nothing is left to be ordered.
            if self._closed is None:
                self._transfer.release(slot, self.first_block + block)

    def _guard(self, do: Callable[..., Any], *args: Any, block: int = -1, fill: int = -1) -> Any:
        """Call ``do``; what goes wrong with a transfer closes the offload."""
        try:
            return do(*args)
        except (UseError, KeyboardInterrupt):
            raise
        except DloError as error:
            self._pool.failure = error
            raise
        except FeedError as error:
            mine = error.block - self.first_block
            self._fail(str(error), mine if 0 <= mine < len(self.names) else block, fill, error)
        except Exception as error:
            self._fail(str(error) or type(error).__name__, block, fill, error)

    def _fail(self, text: str, block: int, fill: int, cause: Exception | None = None) -> NoReturn:
        name = self.names[block] if block >= 0 else self.names[0]
        fill = fill if fill >= 0 else self.tape.issued
        lower = text.lower()
        late = isinstance(cause, TimeoutError) or "timed out" in lower or "timeout" in lower
        failure = (FillTimeout if late else FillError)(
            f"rank {self._rank}: block {name!r} could not be loaded (fill {fill}): {text}; the "
            "offload "
            "is closed on this rank: call shutdown() and offload again",
            rank=self._rank,
            block=name,
            fill=fill,
        )
        self._pool.failure = failure
        raise failure from cause

    @aside
    def _check_grad(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in _tensors_in((*args, *kwargs.values())):
            if tensor.requires_grad:
                raise UseError(
                    "offloaded weights have no gradients, but an argument requires one and grad "
                    "mode is "
                    "on; call the model under torch.inference_mode() or torch.no_grad()"
                )


class _Pass:
    """One pass as a context; an empty one is an idle pass."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def __enter__(self) -> None:
        self._streamer.enter()
        try:
            self._streamer.begin_pass()
        except BaseException:
            self._streamer.leave()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            self._streamer.end_pass()
        finally:
            self._streamer.leave()


def _tensors_in(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())
