"""Serve a diffusion transformer to many clients with Ray Serve, its weights sharded over ranks.

Two ranks (Ray actors, a gloo job of their own) share one copy of the digit transformer's weights;
each runs a request at a time, side by side with the other's. Requests may have different numbers of
steps: the rank that is done earlier serves its part to the other one.

    pip install "ray[serve]"
    python examples/serve_waves.py --ranks 2 --port 8000

    curl -X POST localhost:8000 -d '{"digits": [3, 7], "steps": 20, "seed": 1}'    # the images
    curl -X POST localhost:8000 -d '{"digits": [3], "steps": 20, "wait": false}'   # {"job": "..."}
    curl localhost:8000/?job=...                # state and progress
    curl -X DELETE localhost:8000/?job=...      # cancel it
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import signal
import tempfile
import threading
import uuid
from collections import OrderedDict
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import serve
from starlette.requests import Request  # noqa: TC002 - Ray reads the annotations
from starlette.responses import JSONResponse

import dlo_core as dlo
from dlo_core.demo.model import build_meta_model
from dlo_core.demo.sampler import sample
from dlo_core.demo.weights import FOLDER

MOST_STEPS = 200
MOST_DIGITS = 16
# Outcomes that nobody fetched are forgotten, the oldest first.
MOST_KEPT = 256


@ray.remote(num_cpus=0, max_concurrency=4)
class Rank:
    """One data-parallel rank; ``run`` in one thread, progress and cancelling in others."""

    def __init__(self, rank: int, size: int, store: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        topology = dlo.Topology.from_sizes(dp=size, device_type="cpu")
        self._model = build_meta_model()
        self._offloaded = dlo.offload(
            self._model, device="cpu", topology=topology, checkpoint=FOLDER, timeout_s=60
        )
        self._runner = dlo.WaveRunner(
            self._offloaded, topology=topology, fn=self._draw, ragged=True
        )

    def _draw(self, request: dlo.WaveRequest) -> torch.Tensor:
        labels = torch.tensor(request.kwargs["digits"])
        return sample(
            self._model,
            labels,
            seed=request.seed or 0,
            num_steps=request.num_inference_steps,
            guidance=request.kwargs.get("guidance", 2.0),
        )

    def ready(self) -> str:
        """Return what runs here."""
        return repr(self._offloaded)

    def run(self, requests: list[dlo.WaveRequest] | None) -> list[dlo.WaveResult] | None:
        """Run a wave; all ranks are called."""
        return self._runner.run(requests)

    def progress(self, number: int) -> int:
        """Return how many passes of a request have begun."""
        return self._runner.progress(number)

    def cancel(self, number: int) -> bool:
        """Stop a request before its next pass."""
        return self._runner.cancel(number)

    def stop(self) -> None:
        """Give everything back."""
        self._runner.close()
        self._offloaded.shutdown()


@serve.deployment(max_ongoing_requests=256)
class Digits:
    """Takes requests over HTTP, forms waves, and gives every client its own images."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dlo-serve-")
        store = str(Path(self._folder.name) / "store")
        self._ranks = [Rank.remote(rank, size, store) for rank in range(size)]  # type: ignore[attr-defined]
        ray.get([rank.ready.remote() for rank in self._ranks])
        # Ragged waves: anything goes together.
        self._queue = dlo.WaveQueue(size, window_s=0.02, max_waiting=64, key=None)
        self._jobs: OrderedDict[str, dlo.WaveTicket] = OrderedDict()
        self._running: list[dlo.WaveTicket] = []
        self._waves = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while wave := self._queue.take():
            self._running = wave
            self._waves += 1
            requests = [ticket.request for ticket in wave]
            calls = [rank.run.remote(None if n else requests) for n, rank in enumerate(self._ranks)]
            try:
                results, *_ = ray.get(calls)
            except Exception as error:
                for ticket in wave:
                    ticket.future.set_exception(RuntimeError(f"the ranks failed: {error}"))
                self._queue.close()
            else:
                self._queue.settle(wave, results)
            self._running = []

    async def __call__(self, http: Request) -> JSONResponse:
        """Answer one call."""
        try:
            if http.method == "POST":
                return await self._post(http)
            job = http.query_params.get("job")
            if job is None:
                return JSONResponse({"waiting": len(self._queue), "waves": self._waves})
            if job not in self._jobs:
                return JSONResponse({"error": f"there is no job {job!r}"}, 404)
            if http.method == "DELETE":
                return JSONResponse({"cancelled": await self._cancel(self._jobs[job])})
            return await self._state(self._jobs[job])
        except (ValueError, TypeError, KeyError) as error:
            return JSONResponse({"error": str(error)}, 400)

    async def _post(self, http: Request) -> JSONResponse:
        body = await http.json()
        request = request_of(body)
        try:
            ticket = self._queue.submit(request)
        except dlo.UseError as error:
            return JSONResponse({"error": str(error)}, 503)
        if not body.get("wait", True):
            job = uuid.uuid4().hex
            self._jobs[job] = ticket
            while len(self._jobs) > MOST_KEPT:
                self._jobs.popitem(last=False)
            return JSONResponse({"job": job}, 202)
        try:
            await asyncio.wrap_future(ticket.future)
        except asyncio.CancelledError:
            # The client has gone: nobody wants the images any more.
            await self._cancel(ticket)
            raise
        except Exception as error:
            return JSONResponse({"error": str(error)}, 500)
        return answer(ticket)

    async def _cancel(self, ticket: dlo.WaveTicket) -> bool:
        if ticket.future.cancel():
            return True
        running = self._running
        if ticket not in running:
            return False
        return bool(await self._ranks[0].cancel.remote(running.index(ticket)))

    async def _state(self, ticket: dlo.WaveTicket) -> JSONResponse:
        running = self._running
        if ticket.future.done():
            return answer(ticket)
        if ticket not in running:
            return JSONResponse({"state": "waiting"})
        passes = await self._ranks[0].progress.remote(running.index(ticket))
        # With guidance a step is two passes.
        return JSONResponse({"state": "running", "steps": passes // 2})


def request_of(body: Any) -> dlo.WaveRequest:
    """Return the request of a client, or say what is wrong with it."""
    if not isinstance(body, dict) or not isinstance(body.get("digits"), list):
        raise ValueError('wanted {"digits": [...], "steps": ..., "seed": ...}')
    digits = body["digits"]
    if not 1 <= len(digits) <= MOST_DIGITS or not all(d in range(10) for d in digits):
        raise ValueError(f"digits must be 1 to {MOST_DIGITS} numbers from 0 to 9; got {digits!r}")
    steps = body.get("steps")
    if not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"steps must be a whole number from 1 to {MOST_STEPS}; got {steps!r}")
    return dlo.WaveRequest(steps, {"digits": digits}, seed=body.get("seed", 0))


def answer(ticket: dlo.WaveTicket) -> JSONResponse:
    """Return the images of a request that is done, or why there are none."""
    try:
        images = ticket.future.result(0)
    except CancelledError:
        return JSONResponse({"state": "cancelled"}, 409)
    except Exception as error:
        return JSONResponse({"state": "failed", "error": str(error)}, 500)
    digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()
    return JSONResponse({"state": "done", "sha256": digest, "images": images.tolist()})


def main() -> None:
    """Serve until an interrupt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--temp", default=None, help="folder for Ray's own files; a short path")
    options = parser.parse_args()
    done = threading.Event()
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 << 20,
        _temp_dir=options.temp,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        serve.run(Digits.bind(options.ranks), name="digits")  # type: ignore[attr-defined]
        # After Ray, which takes the signals for itself.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: done.set())
        print(f"ready on http://127.0.0.1:{options.port}", flush=True)
        done.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
