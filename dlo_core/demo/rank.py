"""One rank of the demo: draws its digits resident, then streamed, and reports."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import dlo_core as dlo
from dlo_core import trace
from dlo_core.demo.model import build_meta_model
from dlo_core.demo.result import Failed, RankResult, Step, StreamedRun
from dlo_core.demo.sampler import sample
from dlo_core.demo.weights import FOLDER, load_model
from dlo_core.registry import get_backend

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from dlo_core.demo.job import Job
    from dlo_core.demo.model import DigitTransformer

__all__ = ["run_rank"]

PASSES_PER_STEP = 2
RELEASE_S = 10.0


def run_rank(job: Job, rank: int, store: str, pipe: Connection) -> None:
    """Do all of one rank's work in a process of its own.

    Args:
        job: What to do.
        rank: Which rank this is.
        store: Path of a file, new for this run, over which the ranks find each other.
        pipe: Where ``Step``, ``Failed`` and ``RankResult`` go.
    """
    # Ctrl-C reaches every process of the terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker: Worker | None = None
    try:
        worker = Worker(job, rank, pipe)
        # First of all: the resident and the streamed run must split their work alike.
        torch.set_num_threads(job.threads)
        use_loopback()
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=job.ranks
        )
        pipe.send(worker.run())
        dist.destroy_process_group()
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        mode = "start" if worker is None else worker.mode
        pipe.send(Failed(rank, mode, reason, traceback.format_exc()))
        raise SystemExit(1) from None


class Worker:
    """The work of one rank.

    Attributes:
        mode: What it is doing now.
        backend: Of this rank's device.
    """

    def __init__(self, job: Job, rank: int, pipe: Connection) -> None:
        self.job = job
        self.backend = get_backend(job.device_of(rank))
        self.rank = rank
        self.mode = "start"
        self._pipe = pipe

    def run(self) -> RankResult:
        """Return the resident run and every streamed run."""
        self.mode = "resident"
        model = load_model().to(self.backend.device)
        nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        images, pass_ms = self._draw(model)
        del model
        return RankResult(
            rank=self.rank,
            model_nbytes=nbytes,
            resident_images=images.numpy(),
            resident_pass_ms=pass_ms,
            streamed=tuple(self._stream(mode) for mode in self.job.streamed_modes),
        )

    def _stream(self, mode: str) -> StreamedRun:
        self.mode = mode
        backend = self.backend
        before = most = backend.memory().allocated

        def measure() -> None:
            nonlocal most
            most = max(most, backend.memory().allocated)

        model = build_meta_model()
        offloaded = dlo.offload(
            model,
            device=backend,
            group=dist.group.WORLD,
            checkpoint=FOLDER,
            use_allgather=mode == "gather",
            depth=self.job.depth,
            # The timeline shows the last one.
            time_every=1,
        )
        images, pass_ms = self._draw(model, measure)
        stats = offloaded.stats()
        run = StreamedRun(
            mode=mode,
            images=images.numpy(),
            pass_ms=pass_ms,
            predicted_device_nbytes=offloaded.footprint.device_nbytes,
            measured_device_nbytes=most - before,
            host_nbytes=stats.host_bytes,
            passes=stats.passes,
            fills=stats.fills,
            copied_nbytes=stats.copied_bytes,
            gathered_nbytes=stats.gathered_bytes,
            exposed_ms=stats.exposed_ms,
            overlap=stats.overlap,
            spans=tuple(trace.spans(offloaded)),
        )
        offloaded.shutdown()
        await_release(lambda: backend.memory().allocated - before)
        return run

    def _draw(
        self, model: DigitTransformer, measure: Callable[[], Any] = lambda: None
    ) -> tuple[torch.Tensor, float]:
        """Return this rank's images and the mean milliseconds of a pass."""

        def on_step(_: int) -> None:
            measure()
            self._pipe.send(Step(self.rank, self.mode))

        start = time.perf_counter()
        images = sample(
            model,
            self.job.labels(self.rank),
            seed=self.job.seed(self.rank),
            num_steps=self.job.num_steps,
            guidance=self.job.guidance,
            on_step=on_step,
            device=self.backend.device,
        )
        seconds = time.perf_counter() - start
        return images, seconds * 1e3 / (self.job.num_steps * PASSES_PER_STEP)


def await_release(left: Callable[[], int]) -> None:
    """Wait until no device byte is left, so that the next mode is measured from nothing.

    A gather that was under way when the offload was shut down keeps its slot until it is done.

    Raises:
        RuntimeError: Bytes are left after ``RELEASE_S``.
    """
    deadline = time.monotonic() + RELEASE_S
    while left():
        if time.monotonic() > deadline:
            raise RuntimeError(f"shutdown() left {left():,} bytes on the device")
        time.sleep(0.001)


def use_loopback() -> None:
    """Let gloo talk over the loopback device, unless the user named another one.

    Otherwise gloo looks the host's own name up, which fails or leaves the machine on some.
    """
    names = {name for _, name in socket.if_nameindex()}
    for loopback in sorted(names & {"lo", "lo0"}):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
