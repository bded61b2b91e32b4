"""A toy backend for dlo: a device in ordinary memory, whose streams are one-thread executors."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dlo_core import interface
from dlo_core.collective import all_gather_bytes, release_group
from dlo_core.errors import BackendError, HostMemoryError
from dlo_core.registry import hookimpl


class ToyEvent:
    marked: Any = None  # the future of the latest recording; its result is the time

    def record(self, stream: Any = None) -> None:
        (stream or current()).record_event(self)

    def query(self) -> bool:
        return self.marked is None or bool(self.marked.done())

    def synchronize(self) -> None:
        if self.marked is not None:
            self.marked.result()

    def elapsed_time(self, end_event: ToyEvent) -> float:
        return float(end_event.marked.result() - self.marked.result()) * 1e3


class ToyStream:
    def __init__(self) -> None:
        self._executor, self._last = ThreadPoolExecutor(1), compute.run(int)

    def run(self, work: Any) -> Future[Any]:
        def turn(before: Future[Any] = self._last) -> Any:
            before.result()  # raises when earlier work of the stream failed
            return work()

        self._last = self._executor.submit(turn)
        return self._last

    def wait_event(self, event: ToyEvent) -> None:
        self.run(event.marked.result if event.marked else int)

    def record_event(self, event: ToyEvent | None = None) -> ToyEvent:
        event = event or ToyEvent()
        event.marked = self.run(time.perf_counter)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class ToyCompute(ToyStream):
    def __init__(self) -> None:
        """Need no thread: the caller's own does the work at once, and waits."""

    def run(self, work: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work())
        return done


compute, here = ToyCompute(), threading.local()


def current() -> Any:
    return getattr(here, "stream", compute)


class ToyBuffer:
    pinned, locked_nbytes = False, 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def release(self) -> None:
        vars(self).pop("tensor", None)


class ToyAllocator(interface.PinnedAllocator):
    def allocate(self, nbytes: int) -> ToyBuffer:
        try:
            with torch.inference_mode(False):
                return ToyBuffer(torch.empty(nbytes, dtype=torch.uint8))
        except RuntimeError as error:
            raise HostMemoryError(f"cannot allocate {nbytes:,} bytes of host memory") from error


class ToyCheck(interface.Check):
    found = False

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        current().run(lambda: vars(self).update(found=self.found or not actual.equal(expected)))

    def failed(self) -> bool:
        return self.found


class ToyCollective(interface.Collective):
    def __init__(self, group: Any) -> None:
        self.rank, self.size, self._group = dist.get_rank(group), group.size(), group

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        group = self._group
        current().run(lambda: all_gather_bytes(out, shard, group=group))

    def close(self) -> None:
        group, self._group = self._group, None
        release_group(group)


class ToyBackend(interface.Backend):
    name, comm_library, device = "toy", "gloo", torch.device("cpu")
    capabilities, allocator = interface.Capabilities(host_blocks=True), ToyAllocator()

    def __init__(self) -> None:
        self._streams, self._numbers = weakref.WeakSet[ToyStream](), itertools.count()
        self._live = weakref.WeakValueDictionary[int, torch.UntypedStorage]()

    def new_stream(self, priority: int = 0) -> ToyStream:
        self._streams.add(made := ToyStream())
        return made

    def current_stream(self) -> Any:
        return current()

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, here.stream = current(), stream
        try:
            yield
        finally:
            here.stream = before

    def new_event(self, *, timing: bool = False) -> ToyEvent:
        return ToyEvent()

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            made = torch.empty(nbytes, dtype=torch.uint8)
        self._live[next(self._numbers)] = made.untyped_storage()
        return made

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        current().run(lambda: dst.copy_(src))

    def new_check(self) -> ToyCheck:
        return ToyCheck()

    def collective(self, group: Any) -> ToyCollective:
        return ToyCollective(group)

    def memory(self) -> interface.MemoryInfo:
        used, system = sum(s.nbytes() for s in self._live.values()), psutil.virtual_memory()
        return interface.MemoryInfo(used, used, system.available, system.total)

    def synchronize(self) -> None:
        for stream in list(self._streams):
            stream.synchronize()


@hookimpl
def dlo_backend(device: str) -> ToyBackend:
    if device not in ("toy", "toy:0"):
        raise BackendError(f"there is one toy device, toy:0; got {device!r}")
    return ToyBackend()
