"""What the tests of the Ascend backend share: models on an NPU, and how they skip."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import ascend_stub
import pytest
import torch
from torch import nn
from toys import make_toy

import dlo_core as dlo
from dlo_core import registry
from dlo_core.testing.toys import make_portable_toy

if TYPE_CHECKING:
    from dlo_core.interface import Backend

__all__ = ["VENDOR_WARNINGS", "build", "differences", "inputs_of", "needs_stub", "npu"]

# torch_npu's own, of which we are not the cause.
VENDOR_WARNINGS = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch_npu"),
]

needs_stub = pytest.mark.skipif(
    not ascend_stub.loaded(), reason="needs the stand-in for CANN: tox run -e ascend-stub"
)


def npu(rank: int) -> Backend:
    """Return the backend for the NPU of ``rank``."""
    return registry.get_backend(f"npu:{rank}")


def build(num_blocks: int, dtypes: str = "mixed", seed: int = 0) -> nn.Module:
    """Return a frozen toy on the host: ``mixed`` has awkward dtypes and strides, else ``bf16``."""
    if dtypes == "bf16":
        return make_toy(num_blocks, seed, torch.bfloat16)
    return make_portable_toy(num_blocks, seed)


def inputs_of(model: nn.Module, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return a batch on ``device`` that fits ``model``."""
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, first.shape[-1], generator=generator).to(first.dtype).to(device)


def differences(
    backend: Backend, model: nn.Module, group: Any, *, num_passes: int = 3, **settings: Any
) -> list[str]:
    """Offload ``model``, run it beside its resident twin and say where bits differ.

    Args:
        backend: Of this rank.
        model: On the host.
        group: Of the ranks that share it, or None.
        num_passes: Forwards, without a wait between them.
        **settings: Of ``offload()``.
    """
    resident = copy.deepcopy(model).to(backend.device)
    inputs = [inputs_of(model, backend.device, seed) for seed in range(num_passes)]
    backend.synchronize()
    offloaded = dlo.offload(model, device=backend, group=group, **settings)
    with torch.inference_mode():
        outs = [model(x) for x in inputs]
        wanted = [resident(x) for x in inputs]
    found = [
        f"pass {number} differs"
        for number, (out, want) in enumerate(zip(outs, wanted, strict=True))
        if not torch.equal(out.cpu(), want.cpu())
    ]
    offloaded.disable()
    return found
