"""A small transformer that is parallel in two ways, offloaded, and compared bit for bit.

Run it under torchrun; docs/parallelism.md has the commands for one node and for two. Each
data-parallel rank draws its own input; tensor-parallel ranks share one.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dlo_core as dlo

WIDTH = 256
NUM_BLOCKS = 8


class Block(nn.Module):
    """An MLP with a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus its transform."""
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Blocks, one after the other."""

    dlo_blocks = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.out(x)
        return out


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--no-use-allgather", action="store_true", help="share no weights")
    parser.add_argument("--shard-within", choices=["node"], help="share them within a node only")
    parser.add_argument("--node-name", help="name of this node; the host name if left out")
    return parser.parse_args()


def build(topology: dlo.Topology, device: torch.device) -> Model:
    """Return the model of this rank: the same weights everywhere, cut where TP cuts them."""
    torch.manual_seed(0)
    model = Model().requires_grad_(False).eval()
    assert topology.mesh is not None
    if topology.sizes.tp > 1:
        style = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            # A DTensor lies on the device of its mesh; dlo takes it to the host.
            parallelize_module(block.to(device), topology.mesh["tp"], style)
            if device.type != "cpu":
                block.norm.cpu()
    return model


def main() -> None:
    """Compare the offloaded model with the resident one, and say what a rank holds."""
    args = arguments()
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = found or torch.device("cpu")
    if found is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    topology = dlo.Topology.from_sizes(
        dp=args.dp, tp=args.tp, device_type=device.type, node=args.node_name
    )
    report = topology.describe(
        use_allgather=not args.no_use_allgather, shard_within=args.shard_within
    )
    if dist.get_rank() == 0:
        print(report, flush=True)

    torch.manual_seed(1 + dist.get_rank() // args.tp)
    x = torch.randn(4, WIDTH).to(device)
    with torch.no_grad():
        want = build(topology, device).to(device)(x)
        model = build(topology, device)
        offloaded = dlo.offload(
            model,
            device=device,
            topology=topology,
            use_allgather=not args.no_use_allgather,
            shard_within=args.shard_within,
        )
        same = all(torch.equal(model(x), want) for _ in range(3))
    stats = offloaded.stats()
    print(
        f"rank {dist.get_rank()}: equal bits {same}, shares with {offloaded.size - 1}, "
        f"host {stats.host_bytes} bytes, device {stats.device_bytes} bytes",
        flush=True,
    )
    offloaded.disable()
    dist.destroy_process_group()
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
