"""The sampler: Euler steps along the flow, with classifier-free guidance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from dlo_core.demo.model import DigitTransformer

__all__ = ["sample"]


@torch.inference_mode()
def sample(
    model: DigitTransformer,
    labels: Tensor,
    *,
    seed: int,
    num_steps: int,
    guidance: float,
    on_step: Callable[[int], None] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw one image for each label.

    A step is two passes of the model: one with the labels and one without. The noise is the host's,
    so it is the same on every device.

    Args:
        model: The digit transformer, offloaded or not.
        labels: Classes ``[n]``.
        seed: Seed of the noise.
        num_steps: Euler steps from noise to image.
        guidance: How far to go from the velocity without the labels to the one with them; 1.0 is
            no guidance.
        on_step: Called with the number of steps that are done, after each step.
        device: Where the model computes.

    Returns:
        Images ``[n, size, size]`` in fp32 on the host, -1 for paper and 1 for ink.
    """
    size = model.config.image_size
    generator = torch.Generator("cpu").manual_seed(seed)
    images = torch.randn(len(labels), size, size, generator=generator).to(device)
    labels = labels.to(device)
    nothing = torch.full_like(labels, model.config.null_class)
    for step in range(num_steps):
        times = torch.full((len(labels),), step / num_steps, device=device)
        wanted = model(images, times, labels)
        free = model(images, times, nothing)
        images = images + (free + guidance * (wanted - free)) / num_steps
        if on_step is not None:
            on_step(step + 1)
    return images.cpu()
