"""A toy backend for dlo: a device in ordinary memory, whose streams are one-thread executors."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from dlo_core.collective import all_gather_bytes, release_group
from dlo_core.errors import BackendError, HostMemoryError
from dlo_core.interface import Backend, Capabilities, Check, Collective, MemoryInfo, PinnedAllocator
from dlo_core.registry import hookimpl


def done(value: Any) -> Any:
    future = Future[Any]()
    future.set_result(value)
    return future


class ToyEvent:
    marked = done(0.0)  # the latest recording; its result is the time

    def record(self, stream: Any = None) -> None:
        (stream or current()).record_event(self)

    def query(self) -> bool:
        return bool(self.marked.done())

    def synchronize(self) -> None:
        self.marked.result()

    def elapsed_time(self, end_event: ToyEvent) -> float:
        return float(end_event.marked.result() - self.marked.result()) * 1e3


class ToyStream:
    last = done(None)

    def __init__(self, submit: Any) -> None:
        self._submit = submit

    def run(self, work: Any) -> Any:
        # What comes after work that failed fails, too.
        self.last = self._submit(lambda before: (before.result(), work())[1], self.last)
        return self.last

    def wait_event(self, event: ToyEvent) -> None:
        self.run(event.marked.result)

    def record_event(self, event: ToyEvent | None = None) -> ToyEvent:
        event = event or ToyEvent()
        event.marked = self.run(time.perf_counter)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


# Compute is done by the calling thread at once.
compute, here = ToyStream(lambda work, before: done(work(before))), threading.local()


def current() -> Any:
    return getattr(here, "stream", compute)


class ToyBuffer(SimpleNamespace):
    tensor: torch.Tensor
    pinned, locked_nbytes = False, 0

    def release(self) -> None:
        vars(self).pop("tensor", None)


class ToyAllocator(PinnedAllocator):
    def allocate(self, nbytes: int) -> ToyBuffer:
        try:
            with torch.inference_mode(False):
                return ToyBuffer(tensor=torch.empty(nbytes, dtype=torch.uint8))
        except RuntimeError as error:
            raise HostMemoryError(f"cannot allocate {nbytes:,} bytes of host memory") from error


class ToyCheck(Check):
    found = False

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        current().run(lambda: vars(self).update(found=self.found or not actual.equal(expected)))

    def failed(self) -> bool:
        return self.found


class ToyCollective(Collective):
    def __init__(self, group: Any) -> None:
        self.rank, self.size, self._group = group.rank(), group.size(), group

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        current().run(partial(all_gather_bytes, out, shard, group=self._group))

    def close(self) -> None:
        group, self._group = self._group, None
        release_group(group)


class ToyBackend(Backend):
    name, comm_library, device = "toy", "gloo", torch.device("cpu")
    capabilities, allocator = Capabilities(host_blocks=True), ToyAllocator()

    def __init__(self) -> None:
        self._streams = weakref.WeakSet[ToyStream]()
        self._live = weakref.WeakValueDictionary[int, torch.UntypedStorage]()

    def new_stream(self, priority: int = 0) -> ToyStream:
        self._streams.add(stream := ToyStream(ThreadPoolExecutor(1).submit))
        return stream

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
        self._live[made.data_ptr()] = made.untyped_storage()
        return made

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        current().run(lambda: dst.copy_(src))

    def new_check(self) -> ToyCheck:
        return ToyCheck()

    def collective(self, group: Any) -> ToyCollective:
        return ToyCollective(group)

    def memory(self) -> MemoryInfo:
        used, system = sum(s.nbytes() for s in self._live.values()), psutil.virtual_memory()
        return MemoryInfo(used, used, system.available, system.total)

    def synchronize(self) -> None:
        for stream in list(self._streams):
            stream.synchronize()


@hookimpl
def dlo_backend(device: str) -> ToyBackend:
    if device not in ("toy", "toy:0"):
        raise BackendError(f"there is one toy device, toy:0; got {device!r}")
    return ToyBackend()
