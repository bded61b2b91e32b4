"""Capture: one pass as a graph of the device, which is replayed without queuing it anew.

[Note: a captured pass]
In steady state a pass finds its first blocks in the slots, prefetched by the pass before it, and
leaves the same blocks in the same slots for the next one, provided that the number of blocks is a
multiple of that of the slots. Such a pass can be a graph: every replay finds what it needs and
leaves what the next one needs, and the tape stands where it stood.

While it is recorded the model runs over twins of pool, tape and transfer: the same buffers, but
streams and events of their own, for no event from outside can be waited for inside of a graph, nor
one from inside outside. The side streams begin behind the stream that records (fork), and it goes
on behind them at the end (join). A replay waits for the events of the buffers themselves and
records them anew behind the graph. So passes and replays may take turns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from dlo_core.errors import ConfigError, UseError
from dlo_core.feed import DirectFeed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlo_core.engine import Engine
    from dlo_core.interface import Backend, Graph
    from dlo_core.streamer import Streamer
    from dlo_core.tape import Tape
    from dlo_core.transfer import Transfer

__all__ = ["CapturedPass", "capture_pass"]

_WARM_UP = 2


class CapturedPass:
    """One pass of an offloaded model, recorded as a graph; call it to replay it.

    Attributes:
        output: What the call returned. Every replay writes its tensors anew, so on another stream
            it must wait for whoever reads them.
    """

    def __init__(
        self,
        streamer: Streamer,
        transfer: Transfer,
        graph: Graph,
        *,
        num_fills: int,
        num_skipped: int,
        copied_nbytes: int,
        inputs: tuple[Sequence[Any], Any],
        output: Any,
    ) -> None:
        """Keep what ``capture_pass`` made.

        Args:
            streamer: Of the model.
            transfer: Of the offload.
            graph: Holds the pass.
            num_fills: Fills that it makes.
            num_skipped: Fills that the slots hold already.
            copied_nbytes: Bytes that it copies from the host.
            inputs: The arguments that it reads, flat, and their form.
            output: What the call returned.
        """
        self.output = output
        self._streamer = streamer
        self._transfer = transfer
        self._graph = graph
        self._num_fills = num_fills
        self._num_skipped = num_skipped
        self._copied_nbytes = copied_nbytes
        self._inputs, self._form = inputs
        self._num_drops = streamer.residents.num_drops

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the arguments' tensors into those that the graph reads, and replay it.

        Args:
            args: As at the capture: the same form, shapes, dtypes and devices, and equal values of
                all that is no tensor. None at all: those of the last time.
            kwargs: The same by name.

        Returns:
            ``output``.

        Raises:
            UseError: The arguments have another form, or the model is in use, shut down or
                disabled.
            FillError: A fill could not be queued; the offload is closed.
        """
        given = self._check_arguments(args, kwargs) if args or kwargs else ()
        self._streamer.enter()
        try:
            if self._streamer.residents.num_drops != self._num_drops:
                raise UseError(
                    "the resident layers were dropped since the pass was captured, so its graph "
                    "reads memory that is not theirs any more; capture() again"
                )
            self._streamer.get_ready()
            # First: a replay before this one, on another stream, may still read the arguments.
            self._transfer.before_graph()
            with torch.inference_mode(False), torch.no_grad():
                for mine, new in zip(self._inputs, given, strict=False):
                    if isinstance(mine, torch.Tensor):
                        mine.copy_(new, non_blocking=True)
            self._graph.replay()
            self._transfer.after_graph(self._copied_nbytes)
            self._streamer.tape.count_pass(self._num_fills, self._num_skipped)
        finally:
            self._streamer.leave()
        return self.output

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        given, form = tree_flatten((args, kwargs))
        if form != self._form:
            raise UseError(
                "a captured pass takes the arguments that it was captured with: got another number "
                "or other names; capture() again for these"
            )
        for mine, new in zip(self._inputs, given, strict=True):
            if _kind(mine) != _kind(new):
                raise UseError(
                    f"a captured pass takes {_said(mine)} where it was captured with that; got "
                    f"{_said(new)}; capture() again for this"
                )
        return given

    def __repr__(self) -> str:
        """Show how many fills it holds."""
        return f"CapturedPass({self._num_fills} fills, {self._copied_nbytes:,} bytes)"


def capture_pass(
    engine: Engine,
    backend: Backend,
    streamer: Streamer,
    call: Callable[..., Any],
    *,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CapturedPass:
    """Run ``call`` twice, then record it.

    Args:
        engine: Of the offload.
        backend: Of its device.
        streamer: Of the model.
        call: Runs the model once.
        args: Its arguments; tensors are copied first.
        kwargs: The same by name.

    Raises:
        ConfigError: The pass cannot be captured; says why.
        UseError: ``call`` did not run the model once, or in another way than before.
    """
    _check(engine, backend)
    leaves, form = tree_flatten((args, kwargs))
    with torch.inference_mode(False), torch.no_grad():
        inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    mine, named = tree_unflatten(inputs, form)
    run = partial(call, *mine, **named)
    for _ in range(_WARM_UP):
        before = streamer.tape.num_passes
        run()
        _check_passes(streamer.tape.num_passes - before)
    streamer.enter()
    try:
        _check_places(streamer.tape)
        _make_way(engine, streamer)
        streamer.get_ready()
        pool = engine.pool.twin(backend)
        transfer = engine.transfer.twin(pool)
        tape = streamer.tape.twin(pool, transfer)
        with streamer.instead(tape, transfer, pool, backend.new_event()):
            graph, output = _record(backend, transfer, run)
        _check_passes(tape.num_passes)
        if not streamer.tape.holds_alike(tape):
            raise UseError(
                "the pass could not be captured: it did not run all blocks in their order, so the "
                "next one would not find its first blocks in the slots"
            )
        if engine.choice is not None:
            engine.choice.stop("a pass was captured, and its graph copies what it was made with")
    finally:
        streamer.leave()
    return CapturedPass(
        streamer,
        engine.transfer,
        graph,
        num_fills=tape.num_fills,
        num_skipped=tape.num_skipped,
        copied_nbytes=transfer.copied_nbytes,
        inputs=(inputs, form),
        output=output,
    )


def _record(backend: Backend, transfer: Transfer, run: Callable[[], Any]) -> tuple[Graph, Any]:
    """Return the graph of what ``run`` queues, and what it returns."""
    try:
        with backend.capture() as graph:
            transfer.fork()
            try:
                output = run()
            finally:
                transfer.join()
    except (UseError, ConfigError):
        raise
    # Whatever the device and the model say of it: nothing of it ran. What came first says most,
    # for a graph that is broken refuses all that comes after.
    except Exception as error:
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        raise UseError(
            f"the pass could not be captured: {first}; a graph holds no wait of the host "
            "(.item(), .cpu(), prints of tensors) and no memory of the device that is taken past "
            "torch: take these out, or run the model without capture()"
        ) from error
    return graph, output


def _check(engine: Engine, backend: Backend) -> None:
    """Refuse what cannot be captured whatever the call does."""
    why = None
    if not backend.capabilities.graph_capture:
        why = f"the backend {backend.name!r} captures no graphs"
    elif engine.choice is not None and not engine.choice.by_default:
        why = "packed='auto' may change what is copied; use packed=True or False"
    elif engine.transfer.gathers:
        why = (
            "blocks are gathered from other ranks, and gathers are not captured; use "
            "use_allgather=False"
        )
    elif not isinstance(engine.transfer.feed, DirectFeed):
        why = (
            "blocks are read by the host for each copy (host='mapped' through staging buffers); "
            "use host='pinned' or 'shared'"
        )
    if why is not None:
        raise ConfigError(f"the pass cannot be captured: {why}")


def _make_way(engine: Engine, streamer: Streamer) -> None:
    """Have the weights raw: a graph would copy packed ones when an update has made them raw."""
    choice = engine.choice
    if choice is None:
        return
    made: list[bool] = []
    streamer.guarded(lambda: made.append(choice.make_way("a pass is captured")))
    if made != [True]:
        raise UseError(f"the pass could not be captured: the weights are {choice.reason}")


def _check_places(tape: Tape) -> None:
    if tape.n and tape.n % tape.depth:
        fits = [depth for depth in range(2, tape.n + 1) if tape.n % depth == 0]
        raise ConfigError(
            f"the pass cannot be captured: {tape.n} blocks that stream are no multiple of "
            f"{tape.depth} slots, "
            "so a block's weights lie in another slot in each pass; use depth="
            f"{' or '.join(map(str, fits[:3]))}"
        )


def _check_passes(count: int) -> None:
    if count != 1:
        raise UseError(
            f"the pass cannot be captured: the call ran the model {count} times; it must run it "
            "once"
        )


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    return value


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
    return repr(value)
