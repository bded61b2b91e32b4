"""The engine on a backend: a whole model, offloaded, against the resident run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import dlo_core
from dlo_core.testing.conformance.base import BackendSuite
from dlo_core.testing.toys import assert_restored, inputs, make_portable_toy, snapshot, twin

if TYPE_CHECKING:
    from dlo_core.testing.conformance.lab import Lab

__all__ = ["EngineConformance", "assert_same_passes"]

_PASSES = 3


class EngineConformance(BackendSuite):
    """What dlo does with the backend, in rank-local mode."""

    @pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
    @pytest.mark.parametrize(("num_blocks", "depth"), [(1, 2), (5, 2), (6, 3), (2, 3)])
    def test_an_offloaded_model_gives_the_resident_bits(
        self, lab: Lab, num_blocks: int, depth: int, mode: str
    ) -> None:
        model = make_portable_toy(num_blocks)
        resident = twin(model).to(lab.backend.device)
        before = snapshot(model)
        offloaded = dlo_core.offload(model, device=lab.backend, depth=depth)
        with getattr(torch, mode)():
            assert_same_passes(model, resident, lab.backend.device)
        offloaded.disable()
        assert_restored(model, before)

    def test_a_model_is_offloaded_again_and_again(self, lab: Lab) -> None:
        model = make_portable_toy(4, seed=1)
        resident = twin(model).to(lab.backend.device)
        for _ in range(3):
            offloaded = dlo_core.offload(model, device=lab.backend)
            with torch.inference_mode():
                assert_same_passes(model, resident, lab.backend.device)
            offloaded.disable()

    def test_the_slots_are_given_back(self, lab: Lab) -> None:
        before = lab.allocated()
        model = make_portable_toy(4, seed=2)
        offloaded = dlo_core.offload(model, device=lab.backend)
        with torch.inference_mode():
            model(inputs().to(lab.backend.device))
        assert lab.backend.memory().allocated > before, "memory() does not count the slots"
        offloaded.disable()
        del offloaded
        assert lab.allocated() == before

    def test_blocks_that_stay_lend_their_memory_and_are_loaded_again(self, lab: Lab) -> None:
        model = make_portable_toy(4, seed=4)
        resident = twin(model).to(lab.backend.device)
        offloaded = dlo_core.offload(
            model, device=lab.backend, resident_layers=2, resident_scope="stage"
        )
        with torch.inference_mode():
            assert_same_passes(model, resident, lab.backend.device)
            before = lab.allocated()
            offloaded.offload_resident_layers()
            assert before - lab.allocated() >= offloaded.footprint.residents_nbytes
            assert_same_passes(model, resident, lab.backend.device)
        offloaded.disable()

    def test_the_statistics_can_be_read(self, lab: Lab) -> None:
        model = make_portable_toy(4, seed=3)
        offloaded = dlo_core.offload(model, device=lab.backend)
        with torch.inference_mode():
            for _ in range(2):
                model(inputs().to(lab.backend.device))
        lab.settle()
        stats = offloaded.stats()
        assert stats.passes == 2
        assert stats.exposed_ms >= 0
        assert (stats.pinned_bytes > 0) == lab.backend.capabilities.pinned_memory
        offloaded.disable()


def assert_same_passes(
    model: torch.nn.Module, resident: torch.nn.Module, device: torch.device
) -> None:
    """Run several passes without a wait between them, and compare each."""
    outs = [model(inputs(seed).to(device)) for seed in range(_PASSES)]
    for seed, out in enumerate(outs):
        wanted = resident(inputs(seed).to(device))
        assert torch.equal(out, wanted), f"pass {seed} differs from the resident run"
