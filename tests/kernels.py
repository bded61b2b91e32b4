"""A model whose passes are programs: for the simulated device, whose host runs ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from toys import twin

import dlo_core as dlo
from dlo_core.testing import Recorder, SimBackend, World

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["InnerCalls", "Program"]


class Kernel(nn.Module):
    """A block of one matrix and one vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what no other block returns."""
        return torch.addmm(self.bias, x, self.weight).tanh()


class Program(nn.Module):
    """Blocks that run as each call says."""

    dlo_blocks = ("blocks",)

    def __init__(self, n: int, seed: int = 0, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Kernel(width) for _ in range(n))
        self.scale = nn.Parameter(torch.rand(width))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, calls: Sequence[int] | None = None) -> torch.Tensor:
        """Run the blocks of ``calls``, all by default; a negative number raises."""
        for number in range(len(self.blocks)) if calls is None else calls:
            if number < 0:
                raise ArithmeticError("the program says so")
            x = self.blocks[number](x)
        return x * self.scale


class InnerCalls:
    """A run in which a block is called inside of one, on another stream, with a recorder.

    It is that block itself, or ``inner``.
    """

    def __init__(self, mode: str = "late", *, inner: int = 1, **settings: Any) -> None:
        self._inner = inner
        self._world = World(1, mode)
        self._settings = settings
        self._recorder = Recorder()

    def __call__(self) -> InnerCalls:
        """Run, comparing bits; raise what goes wrong."""
        self._world.run_ranks(self._rank)
        return self

    @torch.no_grad()
    def _rank(self, rank: int) -> None:
        backend = SimBackend(self._world, rank, recorder=self._recorder, host_ahead=True)
        model = Program(3)
        resident = twin(model)
        self._recorder.watch(dlo.offload(model, device=backend, **self._settings))
        other = backend.new_compute_stream("other")
        inner: list[torch.Tensor] = []
        x, y = torch.randn(2, 8), torch.randn(2, 8)

        def call_again(*_: Any) -> None:
            if backend.current_stream() != other:
                with backend.stream(other):
                    inner.append(model.get_submodule(f"blocks.{self._inner}")(y))

        model.get_submodule("blocks.1").register_forward_pre_hook(call_again)
        with backend.compute():
            outs = [model(x), model(x)]
        backend.synchronize()
        assert [torch.equal(out, resident(x)) for out in outs] == [True, True]
        wanted = resident.get_submodule(f"blocks.{self._inner}")(y)
        assert [torch.equal(out, wanted) for out in inner] == [True, True]

    @property
    def races(self) -> list[str]:
        """What the recorder found."""
        return [str(race) for race in self._recorder.races]
