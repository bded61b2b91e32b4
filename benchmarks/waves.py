"""Measure what a wave brings: requests side by side against one after the other, on gloo ranks.

    python benchmarks/waves.py --dp 4 --sp 1

Prints JSON: seconds of one wave of ``dp`` requests, of the same requests one wave each, and whether
every result has the bits that it has on a plain model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

import dlo_core as dlo
from dlo_core.demo.model import build_meta_model
from dlo_core.demo.sampler import sample
from dlo_core.demo.weights import FOLDER, load_model
from dlo_core.testing.ranks import run_ranks


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    requests = [
        dlo.WaveRequest(options.steps, {"prompt": [seed, seed + 1]}, seed=seed)
        for seed in range(options.dp)
    ]

    def draw(model: Any, request: dlo.WaveRequest) -> torch.Tensor:
        labels = torch.tensor(request.kwargs["prompt"])
        steps = request.num_inference_steps
        return sample(model, labels, seed=request.seed or 0, num_steps=steps, guidance=2.0)

    def job(rank: int) -> Any:
        topology = dlo.Topology.from_sizes(dp=options.dp, sp=options.sp, device_type="cpu")
        model = build_meta_model()
        with dlo.offload(model, device="cpu", topology=topology, checkpoint=FOLDER) as offloaded:
            runner = dlo.WaveRunner(
                offloaded, topology=topology, fn=lambda request: draw(model, request)
            )
            together, apart, results = [], [], []
            for _ in range(options.rounds + 1):
                began = time.perf_counter()
                results = runner.run(requests if rank == 0 else None) or []
                together.append(time.perf_counter() - began)
                began = time.perf_counter()
                for request in requests:
                    runner.run([request] if rank == 0 else None)
                apart.append(time.perf_counter() - began)
            runner.close()
        # The first round learns the order and starts threads.
        return together[1:], apart[1:], [result.get() for result in results]

    together, apart, images = run_ranks(job, options.dp * options.sp, limit_s=600)[0]
    plain = load_model()
    same = [
        torch.equal(a, draw(plain, request)) for a, request in zip(images, requests, strict=True)
    ]
    wave, single = statistics.median(together), statistics.median(apart)
    print(
        json.dumps(
            {
                "dp": options.dp,
                "sp": options.sp,
                "requests": options.dp,
                "steps": options.steps,
                "wave_s": round(wave, 3),
                "one_after_the_other_s": round(single, 3),
                "throughput_ratio": round(single / wave, 2),
                "bit_identical": all(same),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
