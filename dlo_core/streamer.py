"""The streamer: when blocks are filled, bound and given back around the user's forward."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from dlo_core.collective import GroupGone
from dlo_core.compiling import OUTSIDE, aside
from dlo_core.errors import BackendError, DloError, FillError, FillTimeout, UseError
from dlo_core.feed import FeedError
from dlo_core.residents import MIXED

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from dlo_core.binding import BlockBinding
    from dlo_core.diagnosis import Diagnosis
    from dlo_core.interface import Event
    from dlo_core.residents import ResidentBlocks
    from dlo_core.slots import Pool, Slot
    from dlo_core.tape import Tape
    from dlo_core.transfer import Transfer

__all__ = ["Streamer"]

# Of an exception's text, on the board.
_LONGEST_TEXT = 300
# Passes of a model whose times are kept whatever comes later: who looks, looks then.
_FIRST_TIMED = 3


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
        time_every: int = 1,
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
            time_every: Of so many passes one keeps times; 0: none does.
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
        self._time_every = time_every
        self._next_timed = 0
        # Of a pass that nobody begins, too.
        self._timed = time_every > 0
        self._before_pass = before_pass
        self._waited: dict[int, None] = {}
        self._loaded: set[int] = set()
        self._depth = [0] * len(self.names)
        self._inside = 0
        self.nests = False
        self.raised = ""
        self.ran_out = ""
        self._closed: str | None = None
        self._captures = False

    def call_root(
        self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the model's own call as one pass."""
        if is_dynamo_compiling():
            torch._dynamo.skip_frame(msg=OUTSIDE)
        self._open_root(args, kwargs)
        try:
            self.begin_pass()
            try:
                out = inner(*args, **kwargs)
            except BaseException as error:
                self._note_raised(error)
                raise
            finally:
                self.end_pass()
            if self._pool.spoiled:
                self.check_alive()
            self._transfer.seal(_tensors_in((out,)))
            return out
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
        slot = self._open(block, args, kwargs)
        try:
            out = inner(*args, **kwargs)
        except BaseException as error:
            self._note_raised(error, block)
            self._shut(block, slot, True)
            raise
        self._shut(block, slot)
        return out

    @aside
    def begin_pass(self) -> None:
        """Open a pass; the caller holds the pool's lock."""
        self._check_graph()
        if self.on_pass is not None:
            self.on_pass()
        self._guard(self._before_pass, self)
        self._guard(self.tape.begin_pass)
        self._waited = {}
        self.raised = ""
        self._loaded = set()
        self._transfer.timed = self._timed = self._is_timed()
        self._transfer.mark(self.pass_start)

    def _is_timed(self) -> bool:
        """Return whether this pass keeps times: [Note: times of some passes], ``transfer.py``."""
        every, done = self._time_every, self.tape.num_passes
        if self._captures or not every:
            return False
        # Not those of round numbers: replays, walks and idle passes count, too.
        timed = done < _FIRST_TIMED or done >= self._next_timed or self.residents.unseen
        self.residents.unseen = False
        if timed:
            self._next_timed = done + every
        return timed

    @aside
    def end_pass(self) -> None:
        """Close the pass, unless the offload failed: then there is nothing to wait for."""
        if self._timed:
            self.last_waited = tuple(self._waited)
            self.last_loaded = frozenset(self._loaded)
        if self._pool.failure is None and self._closed is None:
            self._guard(self.tape.end_pass)
        # Nor does what comes between passes: the times stay those of this one.
        self._transfer.timed = self._timed = False

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
        if self._closed is not None or self._pool.failure is not None or self._pool.torn:
            self.check_alive()
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

    def check_alive(self) -> None:
        """Raise when the offload has failed or was shut down.

        Raises:
            UseError: It has.
        """
        if self._closed is not None:
            raise UseError(f"the model cannot be used: {self._closed}")
        if self._pool.failure is not None:
            failure = self._pool.failure
            rest = "" if isinstance(failure, FillError) else "; call shutdown() and offload again"
            raise UseError(
                f"the offload failed earlier and is closed ({failure}){rest}"
            ) from self._pool.failure

    @aside
    def enter(self, *, repair: bool = False) -> None:
        """Take the pool for this thread; to ``repair`` weights that are half updated, too.

        Raises:
            UseError: Another thread is inside, or the offload is closed.
        """
        self._enter(self.check_alive if repair else self.check_usable)

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
        try:
            if not slot.stays:
                self._transfer.acquire(slot, number)
            elif self._transfer.acquire_resident(slot, number) and self.residents.on_the_way:
                self._loaded.add(number)
        except Exception as error:
            self._say(error, block, -1 if slot.stays else slot.fill)

    def check(self, slot: Slot, block: int) -> None:
        """Refuse a slot that is known by now to hold other bytes than ``block``'s; never waits.

        Raises:
            FillError: It does; the offload is closed.
        """
        if slot.check.failed():
            self._fail(f"it holds {MIXED}", block, slot.fill)

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
    def _open_root(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the pool: what precedes the model's own call."""
        self._enter()
        try:
            self._check_grad(args, kwargs)
        except BaseException:
            self._pool.lock.release()
            raise

    @aside
    def _open(self, block: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Slot:
        """Take the pool and bind a block: what precedes its own call.

        Every block of every pass comes here, and a call of Python takes as long as one of the
        driver: see "The host's time of a block" in ``docs/benchmarks.md``.
        """
        self._enter()
        try:
            if torch.is_grad_enabled():
                self._check_grad(args, kwargs)
            number = self.first_block + block
            slot = self._find(number, block)
            if self._inside and not self._depth[block]:
                self.nests = True
            try:
                self.wait_for(slot, block)
                try:
                    if slot.check.failed():
                        self.check(slot, block)
                    # A block that calls itself is bound already.
                    if not self._depth[block]:
                        self.bindings[block].bind(self._transfer.home(slot))
                except BaseException:
                    self._transfer.release(slot, number)
                    raise
            except BaseException:
                slot.bound -= 1
                raise
            self._inside += 1
            self._depth[block] += 1
            self._waited[number] = None
        except BaseException:
            self._pool.lock.release()
            raise
        return slot

    def _find(self, number: int, block: int) -> Slot:
        """Return the slot that has a block, or will have when the current stream has waited."""
        slot = self._pool.residents.get(number)
        try:
            if not self.tape.open:
                # Nobody began it, or another model's pass came between: it had its own times.
                self.tape.begin_pass()
                self._transfer.timed = self._timed
            if slot is None:
                return self.tape.before(number)
        except Exception as error:
            self._say(error, block)
        slot.bound += 1
        return slot

    @aside
    def _shut(self, block: int, slot: Slot, raised: bool = False) -> None:
        """Unbind a block and give the pool back: what follows its own call."""
        try:
            self._depth[block] -= 1
            self._inside -= 1
            try:
                if not self._depth[block]:
                    self.bindings[block].unbind(raised)
            finally:
                slot.bound -= 1
                # Shut down from inside of the block: nothing is left to be ordered.
                if self._closed is None:
                    self._transfer.release(slot, self.first_block + block)
        finally:
            self._pool.lock.release()

    def _guard(self, do: Callable[..., Any], *args: Any, block: int = -1, fill: int = -1) -> Any:
        """Call ``do``; what goes wrong with a transfer closes the offload."""
        try:
            return do(*args)
        except Exception as error:
            self._say(error, block, fill)

    def _say(self, error: Exception, block: int = -1, fill: int = -1) -> NoReturn:
        """Raise ``error``, or what it means; what went wrong with a transfer closes the offload."""
        # What another thread shut down under this one is released, and the backend says so.
        if self._closed is not None and isinstance(error, BackendError):
            self._fail(str(error), block, fill, error)
        if isinstance(error, DloError):
            if not isinstance(error, UseError):
                self._pool.fail(error)
            try:
                raise error
            finally:
                # Else this frame and the error would keep each other, and the caller's tensors.
                del error
        if isinstance(error, FeedError):
            mine = error.block - self.first_block
            self._fail(str(error), mine if 0 <= mine < len(self.names) else block, fill, error)
        self._fail(str(error) or type(error).__name__, block, fill, error)

    def _fail(self, text: str, block: int, fill: int, cause: Exception | None = None) -> NoReturn:
        if self._closed is not None:
            raise UseError(f"the model cannot be used: {self._closed}") from cause
        known = self._pool.failure
        if not isinstance(known, DloError):
            known = self._closing_error(text, block, fill, cause)
            self._pool.failure = known
        raise known from cause

    def _closing_error(
        self, text: str, block: int, fill: int, cause: Exception | None
    ) -> FillError:
        """Return the error for what went wrong here, with the name of the rank that is to blame."""
        lower = text.lower()
        late = isinstance(cause, TimeoutError) or "timed out" in lower or "timeout" in lower
        mine = self._pool.explain is None or isinstance(cause, FeedError | GroupGone)
        found = None if mine or self._pool.explain is None else self._pool.explain(())
        if found is None or (found.kind == "nobody" and not late):
            return self.failure_of(text, block, fill, late=late, culprit=self._rank)
        if found.culprit < 0:
            said = f"{found.text} ({text})"
        else:
            said = f"timed out: {found.text}" if late else found.text
        return self.failure_of(said, block, fill, late=late, found=found)

    def failure_of(
        self,
        text: str,
        block: int,
        fill: int,
        *,
        late: bool,
        culprit: int = -1,
        found: Diagnosis | None = None,
    ) -> FillError:
        """Return the error of a fill that cannot be had.

        Args:
            text: What is known about the cause.
            block: The block; -1: none in particular.
            fill: The fill; -1: the next one.
            late: Whether it took too long.
            culprit: The rank that is to blame; -1: nobody is known.
            found: The diagnosis, which says so, too.
        """
        name = self.names[block] if block >= 0 else self.names[0]
        fill = fill if fill >= 0 else self.tape.issued
        return (FillTimeout if late else FillError)(
            f"rank {self._rank}: block {name!r} could not be loaded (fill {fill}): {text}; the "
            "offload "
            "is closed on this rank: call shutdown() and offload again",
            rank=self._rank,
            block=name,
            fill=fill,
            culprit=culprit if found is None else found.culprit,
            reason=text if found is None else found.reason or found.text,
        )

    def place(self) -> tuple[str, str, int]:
        """Return what the host does, with which block and fill, for the board; any thread.

        Read without a lock, so it may be a moment old.
        """
        for slot in self._pool.slots:
            if slot.bound and slot.tape is self.tape:
                block = self.tape.block(slot.fill) - self.first_block
                state = "computing" if self._depth[block] else "waiting"
                return state, self.names[block], slot.fill
        last = max(self.tape.issued - 1, 0)
        for number, slot in self._pool.residents.items():
            if slot.bound and 0 <= (block := number - self.first_block) < len(self.names):
                return "computing" if self._depth[block] else "waiting", self.names[block], last
        return "between" if self.tape.open else "outside", "", last

    def _note_raised(self, error: BaseException, block: int = -1) -> None:
        """Keep in words what the caller's code raised, for ranks that wait for this one."""
        if isinstance(error, torch.OutOfMemoryError):
            self.ran_out = self.ran_out or str(error) or "out of memory"
        if not self.raised and not isinstance(error, DloError):
            place = f" in block {self.names[block]!r}" if block >= 0 else ""
            self.raised = f"{type(error).__name__}: {error}{place}"[:_LONGEST_TEXT]

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        try:
            if error is not None:
                self._streamer._note_raised(error)
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
