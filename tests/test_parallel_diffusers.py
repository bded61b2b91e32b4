"""Transformers of diffusers that diffusers itself made parallel, offloaded, bit for bit."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor.parallel
from collective_log import CollectiveLog, LoggedBackend
from ranks import run_ranks
from toys import same_bits

import dlo_core as dlo

diffusers = pytest.importorskip("diffusers")

from diffusers.hooks import tensor_parallel  # noqa: E402
from diffusers_zoo import ZOO, build, forward, make_inputs  # noqa: E402

# Imported before the ranks are forked, for it takes seconds.
CLASSES = {family: getattr(diffusers, ZOO[family].class_name) for family in ("flux", "wan")}

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    # diffusers' own, about names that its classes use themselves.
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    # torch's, about an argument of the functional collectives that diffusers gives.
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.slow,
]

NUM_FORWARDS = 2


def on_cpu() -> None:
    """Let diffusers make a model parallel where torch has no accelerator; in this process only."""
    torch.accelerator.device_count = lambda: 1
    if not hasattr(logging.Logger, "warning_once"):
        # diffusers calls it, and has it from transformers, which is not needed otherwise.
        logging.Logger.warning_once = logging.Logger.warning  # type: ignore[attr-defined]
    tensor_parallel._SUPPORTED_TP_DEVICES = (*tensor_parallel._SUPPORTED_TP_DEVICES, "cpu")


def run_model(rank: int, family: str, dim: str, use_allgather: bool, size: int) -> Any:
    """Compare a model that is parallel in ``dim`` with itself, offloaded."""
    on_cpu()
    model: Any = build(family)
    parallel = (
        diffusers.ContextParallelConfig(ulysses_degree=size)
        if dim == "sp"
        else diffusers.TensorParallelConfig(tp_degree=size)
    )
    model.enable_parallelism(config=parallel)
    # Ranks that share a sequence have the same inputs.
    inputs = [make_inputs(family, seed) | {"return_dict": False} for seed in range(NUM_FORWARDS)]
    log = CollectiveLog()
    backend = LoggedBackend(log)
    with torch.no_grad():
        want = [forward(model, batch) for batch in inputs]
        before = backend.memory().allocated
        groups: dict[str, Any] = {dim: dist.group.WORLD}
        topology = dlo.Topology.from_groups(**groups)
        offloaded = dlo.offload(
            model, device=backend, topology=topology, use_allgather=use_allgather, timeout_s=20
        )
        with log:
            for batch, outputs in zip(inputs, want, strict=True):
                got = forward(model, batch)
                assert all(same_bits(a, b) for a, b in zip(got, outputs, strict=True))
        shares, footprint = offloaded.size, offloaded.footprint
        found = {
            "host": (footprint.host_nbytes, backend.watched.held_nbytes),
            "device": (footprint.device_nbytes, backend.memory().allocated - before),
            "blocks": footprint.blocks_nbytes,
        }
        offloaded.disable()
        got = forward(model, inputs[0])
        assert all(same_bits(a, b) for a, b in zip(got, want[0], strict=True))
    return shares, log.entries, found


def check(
    family: str, dim: str, size: int, use_allgather: bool, record: Callable[[str, object], None]
) -> None:
    results = run_ranks(run_model, size, family, dim, use_allgather, size, limit_s=100)
    shares, entries, found = results[0]
    assert shares == (size if use_allgather and dim == "sp" else 1)
    assert all(order == entries for _, order, _ in results)
    assert {"model"} < {whose for whose, _, _ in entries} or shares == 1
    for predicted, counted in (found["host"], found["device"]):
        assert abs(counted - predicted) <= 0.01 * predicted
    row = {
        "name": f"{dim.upper()}{size}",
        "model": family,
        "use_allgather": use_allgather,
        "ranks": size,
        "shares": shares,
        "rejected": "",
        "found": found,
    }
    record("cell", json.dumps(row))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("use_allgather", [True, False], ids=["gather", "no-gather"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", CLASSES)
def test_ulysses_of_diffusers_is_bit_identical(
    family: str, size: int, use_allgather: bool, record_property: Callable[[str, object], None]
) -> None:
    check(family, "sp", size, use_allgather, record_property)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("use_allgather", [True, False], ids=["gather", "no-gather"])
def test_tensor_parallelism_of_diffusers_is_bit_identical(
    use_allgather: bool, record_property: Callable[[str, object], None]
) -> None:
    """A block mixes plain tensors with DTensors that are cut along either dimension, and whole."""
    check("flux", "tp", 2, use_allgather, record_property)
