"""Graphs: work that is recorded and not run, and runs as a whole at every replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import dlo_core
from dlo_core.errors import BackendError
from dlo_core.testing.conformance.base import BackendSuite
from dlo_core.testing.conformance.lab import pattern
from dlo_core.testing.toys import inputs, make_portable_toy, twin

if TYPE_CHECKING:
    from dlo_core.interface import Backend
    from dlo_core.testing.conformance.lab import Lab

__all__ = ["GraphConformance"]

_NBYTES = 1 << 16


class GraphConformance(BackendSuite):
    """What the interface promises of ``Backend.capture``, where there are graphs."""

    @pytest.fixture
    def graphs(self, lab: Lab) -> Lab:
        """Return the lab, where the backend captures graphs."""
        if not lab.backend.capabilities.graph_capture:
            pytest.skip("Capabilities.graph_capture is False")
        return lab

    def test_capture_is_as_declared(self, backend: Backend) -> None:
        if backend.capabilities.graph_capture:
            return
        with pytest.raises(BackendError), backend.capture():
            pass

    def test_a_copy_is_recorded_and_runs_at_every_replay(self, graphs: Lab) -> None:
        host, device = graphs.host(_NBYTES, 1), graphs.device(_NBYTES)
        with graphs.backend.capture() as graph:
            graphs.backend.copy(device, host)
        assert not bool(graphs.read(device).any()), "what was recorded also ran"
        for seed in (2, 3):
            graphs.settle()
            host.copy_(pattern(_NBYTES, seed))
            graph.replay()
            assert torch.equal(graphs.read(device), pattern(_NBYTES, seed))

    def test_a_stream_that_waits_for_the_recording_one_records_too(self, graphs: Lab) -> None:
        backend, side = graphs.backend, graphs.stream()
        host, middle = graphs.host(_NBYTES, 4), graphs.device(_NBYTES)
        device = graphs.device(_NBYTES)
        with backend.capture() as graph:
            current, began, ended = (
                backend.current_stream(),
                backend.new_event(),
                backend.new_event(),
            )
            current.record_event(began)
            side.wait_event(began)
            graphs.copy(side, middle, host)
            side.record_event(ended)
            current.wait_event(ended)
            backend.copy(device, middle)
        assert not bool(graphs.read(middle).any()), "the side stream's work also ran"
        graph.replay()
        assert torch.equal(graphs.read(device), pattern(_NBYTES, 4))

    def test_a_replay_is_ordered_on_its_stream(self, graphs: Lab) -> None:
        host, device = graphs.host(_NBYTES, 5), graphs.device(_NBYTES)
        back = graphs.host(_NBYTES)
        with graphs.backend.capture() as graph:
            graphs.backend.copy(device, host)
        stream = graphs.stream()
        with graphs.backend.stream(stream):
            graphs.busy(stream)
            graph.replay()
            graphs.backend.copy(back, device)
        stream.synchronize()
        assert torch.equal(back, pattern(_NBYTES, 5))

    @pytest.mark.parametrize(("num_blocks", "depth"), [(4, 2), (3, 3), (6, 3)])
    def test_a_captured_pass_gives_the_resident_bits(
        self, graphs: Lab, num_blocks: int, depth: int
    ) -> None:
        device = graphs.backend.device
        model = make_portable_toy(num_blocks, seed=7)
        resident = twin(model).to(device)
        offloaded = dlo_core.offload(model, device=graphs.backend, depth=depth)
        with torch.inference_mode():
            captured = offloaded.capture(model, inputs(0).to(device))
            outs = []
            for seed in range(4):
                outs.append(captured(inputs(seed).to(device)).clone())
                outs.append(model(inputs(seed).to(device)))
            graphs.settle()
            for number, out in enumerate(outs):
                assert torch.equal(out, resident(inputs(number // 2).to(device))), number
        del captured
        offloaded.disable()
