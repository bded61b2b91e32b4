"""The job of a demo: what every rank draws, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dlo_core.demo.model import ModelConfig

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks do; the same on all of them.

    Attributes:
        ranks: Processes of the group.
        depth: Slots on the device.
        use_allgather: Whether to run gather mode before rank-local mode.
        device: Where blocks compute; without an index, each rank takes the device of its number.
        num_images: Digits that each rank draws.
        num_steps: Euler steps from noise to image.
        guidance: Strength of the classifier-free guidance.
        threads: Threads of each rank's compute, resident and streamed alike.
    """

    ranks: int = 2
    depth: int = 2
    use_allgather: bool = True
    device: str = "cpu"
    num_images: int = 10
    num_steps: int = 24
    guidance: float = 2.0
    threads: int = 1

    @property
    def streamed_modes(self) -> tuple[str, ...]:
        """The modes in which the weights stream, in the order in which they run."""
        return ("gather", "rank-local") if self.use_allgather else ("rank-local",)

    @property
    def total_steps(self) -> int:
        """Euler steps of one rank in all modes, the resident run included."""
        return self.num_steps * (1 + len(self.streamed_modes))

    def device_of(self, rank: int) -> str:
        """Return the device of ``rank``: on a machine with one CPU, all ranks share it."""
        shared = self.device == "cpu" or ":" in self.device
        return self.device if shared else f"{self.device}:{rank}"

    def labels(self, rank: int) -> torch.Tensor:
        """Return the digits that ``rank`` draws, in an order of its own, ``[num_images]``."""
        generator = torch.Generator("cpu").manual_seed(self.seed(rank))
        count = ModelConfig().num_classes
        rounds = -(-self.num_images // count)
        digits = [torch.randperm(count, generator=generator) for _ in range(rounds)]
        return torch.cat(digits)[: self.num_images]

    def seed(self, rank: int) -> int:
        """Return the seed of the noise of ``rank``."""
        return 2026 + rank
