"""dlo: Distributed Layerwise Offload for diffusion transformers.

An accelerator keeps only a few transformer blocks' weights; the other blocks wait in host memory
and stream in while earlier blocks compute. In a group of ranks each rank's host keeps 1/size of
every block, rebuilt by all-gather on the device::

    import dlo_core as dlo

    offloaded = dlo.offload(model, device=device, group=group, checkpoint="path/to/weights")
"""

import logging

import dlo_core._torch  # noqa: F401 - first of all: it says why torch cannot be imported
from dlo_core._version import __version__
from dlo_core.api import offload, offloaded
from dlo_core.capture import CapturedPass
from dlo_core.config import OffloadConfig
from dlo_core.errors import (
    AgreementError,
    BackendError,
    CheckpointError,
    ConfigError,
    DloError,
    DloWarning,
    FillError,
    FillTimeout,
    HostMemoryError,
    RestoreError,
    UseError,
)
from dlo_core.footprint import Footprint
from dlo_core.interface import Backend, Capabilities
from dlo_core.key_map import AddPrefix, Fuse, Ignore, Split, StripPrefix
from dlo_core.layerwise import LayerwiseOffload
from dlo_core.progress import LoadProgress
from dlo_core.registry import hookimpl
from dlo_core.stats import BlockState, BlockStats, Stats
from dlo_core.topology import Topology
from dlo_core.topology_report import TopologyReport
from dlo_core.transforms import Cast, Convert, Reshape, Transpose
from dlo_core.wave_queue import WaveQueue, WaveTicket
from dlo_core.wave_request import WaveRequest
from dlo_core.waves import WaveReport, WaveResult, WaveRunner

__all__ = [
    "AddPrefix",
    "AgreementError",
    "Backend",
    "BackendError",
    "BlockState",
    "BlockStats",
    "Capabilities",
    "CapturedPass",
    "Cast",
    "CheckpointError",
    "ConfigError",
    "Convert",
    "DloError",
    "DloWarning",
    "FillError",
    "FillTimeout",
    "Footprint",
    "Fuse",
    "HostMemoryError",
    "Ignore",
    "LayerwiseOffload",
    "LoadProgress",
    "OffloadConfig",
    "Reshape",
    "RestoreError",
    "Split",
    "Stats",
    "StripPrefix",
    "Topology",
    "TopologyReport",
    "Transpose",
    "UseError",
    "WaveQueue",
    "WaveReport",
    "WaveRequest",
    "WaveResult",
    "WaveRunner",
    "WaveTicket",
    "__version__",
    "hookimpl",
    "offload",
    "offloaded",
]

logging.getLogger("dlo").addHandler(logging.NullHandler())
