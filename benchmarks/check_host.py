"""Host: what the host does for a block, as a sum, as the prices of its parts, and as a profile."""

from __future__ import annotations

import cProfile
import importlib
import io
import pstats
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from checks import Findings, Options
    from torch import nn

    from dlo_core.bench.model import Shape
    from dlo_core.interface import Backend

__all__ = ["host"]

_IN_A_STRETCH, _IN_A_STRETCH_ON_CPU = 10, 2
_COMPILER = "torch._dynamo"
_ROWS = 30
_clock = time.perf_counter


def host(options: Options, found: Findings) -> None:
    """Time what the host does for a block, and say what it is made of.

    All of it once as it comes and once beside the compiler, whose presence changes how dlo calls
    its own parts.
    """
    import torch

    from dlo_core.bench.model import Shape

    shape = Shape(80, 4, 5, 0, "float32") if options.small else Shape(480, 4, 12)
    found.note(compiler_was_loaded=_COMPILER in sys.modules)
    if options.small:
        # On a busy machine threads that wait for each other would take the time.
        torch.set_num_threads(1)
    bench = _HostBench(options, found, shape)
    with torch.inference_mode():
        bench.measure("")
        importlib.import_module(_COMPILER)
        bench.measure("_with_compiler")


@dataclass(frozen=True, slots=True)
class _HostBench:
    """Measures the host's side of passes so small that the device is done with them sooner.

    Attributes:
        options: How the section runs.
        found: Where it goes.
        shape: Of the model.
    """

    options: Options
    found: Findings
    shape: Shape

    def measure(self, suffix: str) -> None:
        """Measure all; ``suffix`` is added to the facts' names."""
        import torch

        import dlo_core as dlo
        from dlo_core.bench.model import build

        found, args = self.found, self._args()
        resident, model = build(self.shape, self.options.device), build(self.shape)
        offloaded = self._sum(suffix, resident, model)
        in_place = self._in_place(offloaded, resident, model)
        found.note(**{f"in_place_us{suffix}": in_place})
        if self.options.cuda and not suffix:
            # On a CPU the copies are the host's work, too. A streamed pass takes longer than a
            # resident one by more than this: the model's own operations do, beside copies.
            taken = in_place["open"] + in_place["shut"]
            found.at_most("host time of a block in place, µs", taken, 60.0)
        with _Priced(offloaded.backend, offloaded, small=self.options.small) as priced:
            found.note(**{f"prices_us{suffix}": priced.all()})
        same = torch.equal(model(*args), resident(*args))
        found.true(f"same bits after the parts were called{suffix}", same)
        offloaded.shutdown()
        for name, count in (("", 0), ("_resident", self.shape.num_blocks)):
            # Blocks that compute nothing leave what dlo does; those that stay have no fill. They
            # are so narrow that the link is done with each before the host is.
            idle, alone = _idle(self._narrow), _idle(self._narrow).to(self.options.device)
            offloaded = dlo.offload(
                idle, device=self.options.device, resident_layers=count, packed=False
            )
            rows = self._in_turn(alone, idle)
            found.note(**{f"engine_us_a_block{name}{suffix}": self._a_block(rows)})
            if not count:
                found.note(**{f"engine_profile{suffix}": self._profile(idle)})
            offloaded.shutdown()

    def _sum(self, suffix: str, resident: nn.Module, model: nn.Module) -> Any:
        import dlo_core as dlo

        found = self.found
        offloaded = dlo.offload(model, device=self.options.device, packed=False)
        rows = self._in_turn(resident, model)
        alone, streamed = zip(*rows, strict=True)
        figures = self._a_block(rows)
        found.note(
            **{
                f"resident_us{suffix}": round(statistics.median(alone), 1),
                f"streamed_us{suffix}": round(statistics.median(streamed), 1),
                f"blocks{suffix}": self.shape.num_blocks,
                f"host_us_a_block{suffix}": figures,
            }
        )
        found.note(**{f"profile{suffix}": self._profile(model)})
        return offloaded

    @property
    def _narrow(self) -> Shape:
        """The shape with blocks whose weights are a sixth of those of the others."""
        return replace(self.shape, width=self.shape.width * 2 // 5)

    def _in_place(self, offloaded: Any, resident: nn.Module, model: nn.Module) -> dict[str, float]:
        """Return the microseconds of the parts of a block's call while the model runs.

        Between a block's own operations each part takes longer than again and again by itself,
        and the operations may take longer between them.
        """
        streamer = offloaded._engine.streamers[0]
        watch = _Watch()
        blocks: Any = resident.blocks
        with watch.over(streamer, "_open"), watch.over(streamer, "_shut"):
            self._issue_us(model)
            inner, opened, shut = watch.between(), watch.taken("_open"), watch.taken("_shut")
        watched: dict[str, Sequence[Any]] = {
            **dict.fromkeys(("bind", "unbind"), streamer.bindings),
            **{name: [streamer._transfer] for name in ("fill", "acquire", "release")},
            "copy": [offloaded.backend],
        }
        with ExitStack() as stack:
            for name, owners in watched.items():
                for owner in owners:
                    stack.enter_context(watch.over(owner, name))
            self._issue_us(model)
        inside = {name: watch.taken(name) for name in watched}
        with ExitStack() as stack:
            for block in blocks:
                block._compiled_call_impl = block._call_impl
                stack.callback(setattr, block, "_compiled_call_impl", None)
                stack.enter_context(watch.over(block, "_compiled_call_impl"))
            self._issue_us(resident)
            alone = watch.taken("_compiled_call_impl")
        whole = {"open": opened, "block": inner, "shut": shut, "block_of_resident_model": alone}
        return whole | inside

    def _in_turn(self, resident: nn.Module, model: nn.Module) -> list[tuple[float, float]]:
        """Return the microseconds of a pass of both, in turn: what else the host does changes."""
        rounds = 22 if self.options.cuda else 4
        return [(self._issue_us(resident), self._issue_us(model)) for _ in range(rounds)][2:]

    def _issue_us(self, model: nn.Module) -> float:
        """Return the microseconds in which the host issues a pass, in a stretch of some."""
        args = self._args()
        passes = _IN_A_STRETCH if self.options.cuda else _IN_A_STRETCH_ON_CPU
        start = time.perf_counter()
        for _ in range(passes):
            model(*args)
        taken = (time.perf_counter() - start) / passes * 1e6
        self._synchronize()
        return taken

    def _a_block(self, rows: list[tuple[float, float]]) -> dict[str, float]:
        """Return what a streamed pass takes longer than a resident one, a block."""
        count = self.shape.num_blocks
        longer = statistics.median(after - before for before, after in rows) / count
        alone, streamed = zip(*rows, strict=True)
        least = (min(streamed) - min(alone)) / count
        return {"median": round(longer, 1), "least": round(least, 1)}

    def _profile(self, model: nn.Module) -> list[str]:
        """Return what functions take in streamed passes, those of the most own time first."""
        args, passes = self._args(), 3 * _IN_A_STRETCH if self.options.cuda else 3
        profiler = cProfile.Profile()
        for _ in range(passes):
            profiler.enable()
            model(*args)
            profiler.disable()
        self._synchronize()
        text = io.StringIO()
        rows = pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime")
        rows.print_stats(_ROWS)
        about = f"{passes} passes of {self.shape.num_blocks} blocks, under the profiler"
        return [about, *(line.rstrip() for line in text.getvalue().splitlines() if line.strip())]

    def _args(self) -> Any:
        from dlo_core.bench.model import inputs

        return inputs(self.shape, 16, self.options.device)

    def _synchronize(self) -> None:
        import torch

        if self.options.cuda:
            torch.cuda.synchronize()


class _Watch:
    """Notes when functions were entered and left."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, float]]] = {}

    @contextmanager
    def over(self, owner: Any, name: str) -> Iterator[None]:
        """Have calls of the attribute ``name`` of ``owner`` noted."""
        inner, seen, clock = getattr(owner, name), self._seen.setdefault(name, []), _clock
        kept = vars(owner).get(name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            out = inner(*args, **kwargs)
            seen.append((start, clock()))
            return out

        setattr(owner, name, timed)
        try:
            yield
        finally:
            delattr(owner, name)
            if kept is not None:
                setattr(owner, name, kept)

    def taken(self, name: str) -> float:
        """Return the median of the microseconds of a call."""
        return round(statistics.median(end - start for start, end in self._seen[name]) * 1e6, 1)

    def between(self) -> float:
        """Return the median of the microseconds from a block's opening to its end."""
        pairs = zip(self._seen["_open"], self._seen["_shut"], strict=True)
        return round(statistics.median(shut[0] - opened[1] for opened, shut in pairs) * 1e6, 1)


def _idle(shape: Shape) -> nn.Module:
    """Return the model, small, whose blocks have their weights and compute nothing."""
    import torch

    from dlo_core.bench.model import Block, SyntheticTransformer

    class Idle(Block):
        """Returns what it gets."""

        def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
            return x

    class IdleTransformer(SyntheticTransformer):
        block_class: ClassVar[type[Block]] = Idle

    with torch.inference_mode(False):
        model = IdleTransformer(shape).to(getattr(torch, shape.dtype))
    return model.requires_grad_(False).eval()


class _Priced:
    """The single things that dlo does for a block on this device, each with its price."""

    def __init__(self, backend: Backend, offloaded: Any, *, small: bool) -> None:
        """Make what they are done to.

        Args:
            backend: Of the device.
            offloaded: An offload between two passes, whose parts are called; they end as they were.
            small: Whether few calls will do.
        """
        self._backend = backend
        self._calls = 20 if small else 100
        self._rounds = 3 if small else 9
        self._side = backend.new_stream()
        engine = offloaded._engine
        self._transfer, self._streamer = engine.transfer, engine.streamers[0]
        self._slot = engine.pool.slots[0]
        nbytes = self._slot.buffer.nbytes
        self._host = backend.allocator.allocate(nbytes)
        self._host.tensor.fill_(1)
        self._device = backend.empty(nbytes)

    def __enter__(self) -> _Priced:
        return self

    def __exit__(self, *exc: object) -> None:
        self._backend.synchronize()
        self._host.release()

    def all(self) -> dict[str, Any]:
        """Return microseconds a call, ``[median, least]``; of what fails the reason."""
        return {name: self._price_us(work) for name, work in self._works().items()}

    def _price_us(self, work: Callable[[], object]) -> list[float] | str:
        taken = []
        try:
            for _ in range(self._rounds + 1):
                start = time.perf_counter()
                for _ in repeat(None, self._calls):
                    work()
                taken.append((time.perf_counter() - start) / self._calls * 1e6)
                # A queue that is full would make the host wait.
                self._backend.synchronize()
        # One price that cannot be had; what is called here are parts that may change.
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        return [round(statistics.median(taken[1:]), 2), round(min(taken), 2)]

    def _works(self) -> dict[str, Callable[[], object]]:
        works: dict[str, Callable[[], object]] = {"nothing": lambda: None}
        return works | self._of_torch() | self._of_dlo()

    def _of_torch(self) -> dict[str, Callable[[], object]]:
        """Return what streams, events and copies are asked for."""
        import torch

        backend, side, device = self._backend, self._side, self._device
        current, host = backend.current_stream(), self._host.tensor
        plain, timing = backend.new_event(), backend.new_event(timing=True)
        on_side = backend.new_event()
        side.record_event(on_side)
        half = device.nbytes // 2

        def switch() -> None:
            with backend.stream(side):
                pass

        def copy_on_side() -> None:
            with backend.stream(side):
                backend.copy(device, host)

        works: dict[str, Callable[[], object]] = {
            "current stream": backend.current_stream,
            "switch of streams and back": switch,
            "record, plain, current stream": lambda: current.record_event(plain),
            "record, timing, current stream": lambda: current.record_event(timing),
            "record, plain, side stream": lambda: side.record_event(on_side),
            "record, timing, side stream": lambda: side.record_event(timing),
            "wait of the current stream": lambda: current.wait_event(on_side),
            "wait of a side stream": lambda: side.wait_event(plain),
            "query of an event": on_side.query,
            "new event": backend.new_event,
            "new timing event": lambda: backend.new_event(timing=True),
            "slice of a tensor": lambda: device[:half],
            "bytes of a tensor": lambda: device.nbytes,
            "copy of a block, the backend's": lambda: backend.copy(device, host),
            "the same on a side stream, with the switch": copy_on_side,
            "copy of a block, copy_": lambda: device.copy_(host, non_blocking=True),
            "grad mode asked for": torch.is_grad_enabled,
        }
        if device.device.type != "cpu":
            works["record_stream"] = lambda: device.record_stream(current)  # type: ignore[arg-type]
        return works

    def _of_dlo(self) -> dict[str, Callable[[], object]]:
        """Return the engine's own parts; each leaves them as it finds them."""
        from torch.compiler import is_dynamo_compiling

        from dlo_core.compiling import aside

        streamer, transfer, slot = self._streamer, self._transfer, self._slot
        block = streamer.tape.block(slot.fill)
        binding = streamer.bindings[block - streamer.first_block]

        def bind() -> None:
            binding.bind(slot)
            binding.unbind()

        def use() -> None:
            transfer.acquire(slot, block)
            transfer.release(slot, block)

        def lock() -> None:
            streamer.enter()
            streamer.leave()

        return {
            "whether a compiler traces": is_dynamo_compiling,
            "a function kept from the compiler": aside(lambda: None),
            "lock, checks, unlock": lock,
            "bind and unbind": bind,
            "wait for a slot, give it back": use,
            "fill of a slot": lambda: transfer.fill(slot, block, slot.fill),
        }
