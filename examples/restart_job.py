"""A job that comes back by itself: a rank dies, and the pictures are drawn all the same.

Under torchrun with restarts, whatever ends one rank is an error on all the others within the
deadline; the launcher then starts all ranks anew, and they draw the pictures that are missing.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restart_job.py --out pictures

Without the variable the launcher keeps one store for all attempts, and a group of the second
attempt may find the addresses of the first one's ranks in it, and hang or fail while it connects
(https://github.com/pytorch/pytorch/issues/135712).

``--fault kill`` (or ``stop``) tries it out: in the first attempt a rank is killed (or stopped) in
the middle of a picture.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dlo_core as dlo
from dlo_core.demo.model import DigitTransformer, build_meta_model
from dlo_core.demo.sampler import sample
from dlo_core.demo.weights import FOLDER


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="deadline of one fill")
    parser.add_argument("--fault", choices=("kill", "stop"), help="what happens to rank 1, once")
    return parser.parse_args()


def check_store() -> None:
    """Refuse a store that holds what an attempt before this one left."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise SystemExit(
            "torchrun would restart the ranks with the store of the attempt before, in which they "
            "find addresses of dead ranks: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it, and "
            "give it --standalone or --rdzv-backend c10d"
        )


def draw(model: DigitTransformer, number: int, steps: int) -> torch.Tensor:
    """Return picture ``number``, the same in every attempt."""
    return sample(model, torch.tensor([number % 10]), seed=number, num_steps=steps, guidance=2.0)


def keep(picture: torch.Tensor, path: Path) -> None:
    """Write the picture whole or not at all."""
    torch.save(picture, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def arm(model: DigitTransformer, fault: str, passes: int) -> None:
    """Let this process be killed or stopped in a block, after so many passes."""
    calls = itertools.count()

    def strike(module: Any, args: Any) -> None:
        if next(calls) == passes:
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    model.blocks[3].register_forward_pre_hook(strike)


def main() -> None:
    """Draw the pictures that are not there yet, each rank its own."""
    options = arguments()
    check_store()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    options.out.mkdir(parents=True, exist_ok=True)
    model = build_meta_model()
    if options.fault and rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        arm(model, options.fault, passes=3 * options.steps)
    with dlo.offload(
        model,
        device="cpu",
        group=dist.group.WORLD,
        checkpoint=FOLDER,
        timeout_s=options.timeout_s,
    ) as offloaded:
        # Every rank makes the same number of passes: a picture that is there is drawn again where
        # another rank's is missing.
        for first in range(0, options.pictures, size):
            paths = [options.out / f"{number}.pt" for number in range(first, first + size)]
            there: list[bool] = [path.exists() for path in paths]
            dist.broadcast_object_list(there)
            if all(there):
                continue
            keep(draw(model, first + rank, options.steps), paths[rank])
    print(f"rank {rank}: done, {offloaded!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
