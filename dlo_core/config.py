"""The settings of an offload, frozen and JSON-able; each is honoured or refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from dlo_core.errors import ConfigError
from dlo_core.residency import PLACEMENTS

__all__ = ["GATHER_MEANS", "HOST_TIERS", "SCOPES", "OffloadConfig"]

SCOPES = ("permanent", "stage")
GATHER_MEANS = ("kernels", "copies")
HOST_TIERS = ("pinned", "shared", "mapped", "pageable")
# Ten years; a comm library counts in milliseconds or less and overflows some way beyond.
_LONGEST_S = 315_360_000
_MOST_THREADS = 256
# Passes between two looks of packed="auto".
MOST_AUTO = 8


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """How to offload.

    Attributes:
        use_allgather: Shard the weights over the group and rebuild each block by all-gather;
            False: every rank keeps all of its own weights and there is no collective.
        depth: Slots on the device, at least 2: the current block and the ones being loaded.
        stages: Device buffers of shard size in gather mode: 2, or 0 to copy the shard into the
            slot's
            own part and gather in place.
        gather_by: What moves the bytes in gather mode: ``"kernels"`` of the comm library, or
            ``"copies"`` of the device's copy engines, which leave the processors to compute. A
            gather by copies whose peer died cannot be given up: that process must be restarted (see
            docs/parallelism.md).
        resident_layers: How many blocks of each model stay on the device, or ``"auto"``: as many as
            ``device_budget_bytes`` holds.
        resident_placement: ``"spread"``: evenly over the model, which hides the most copies; or
            ``"leading"``: the first ones.
        resident_scope: ``"permanent"``, or ``"stage"``: ``offload_resident_layers()`` gives their
            device memory to what runs between two denoise stages.
        device_budget_bytes: The most bytes that the weights may take on the device: slots, stages,
            what stays, and the rest of the model. None: no limit.
        resident: Dotted names of modules or tensors that stay on the device.
        host: Kind of host memory (see docs/host-memory.md): ``"pinned"``, ``"shared"`` (one copy
            a node, for ranks that do not gather), ``"mapped"`` (the checkpoint's pages),
            ``"pageable"``; None: pinned where the backend can and pageable elsewhere, and one that
            takes less where that does not fit. Ranks may differ.
        pin_budget_bytes: The most bytes of host memory that this rank may page-lock; the blocks
            beyond it are pageable. None: no limit of the caller's.
        shard_within: ``"node"``: the shards are spread over those ranks of the shard group that are
            on one node, so that no weights travel between nodes and each node has a whole copy.
            None: over the whole group.
        timeout_s: Seconds that one fill may take.
        load_timeout_s: Seconds that the ranks wait for each other while loading.
        strict: Whether a checkpoint that does not fit the model is an error. False: the model's own
            values are used when every tensor has some, with a warning.
        packed: Whether bf16 weights travel and wait packed, without losing a bit, and are decoded
            right before each block computes; see docs/packed.md. ``"auto"``: loaded raw, and packed
            when the first passes show that it is faster, the resident blocks, too, if that is.
            None: as ``"auto"``, but later, and only where nothing else is lost by it: where the
            backend has a codec of its own, nothing is gathered, there is no
            ``device_budget_bytes``, and the weights lie in host memory of this rank's own.
        verify_packed: Whether packed weights are decoded once and compared while loading.
        time_every: Of so many passes one keeps the times of its blocks for ``stats()`` and traces;
            the first three do, too, and those that load resident blocks. 1: every pass does, at
            the price of up to five more events a block; 0: none. Ranks may differ.
        load_threads: Threads that read a checkpoint at once; None: one a CPU that this process may
            use, at most 16. Ranks may differ.
        direct_io: Read checkpoints past the page cache (``O_DIRECT``). Ranks may differ.
    """

    use_allgather: bool = True
    depth: int = 2
    stages: int = 2
    gather_by: str = "kernels"
    resident_layers: int | Literal["auto"] = 0
    resident_placement: str = "spread"
    resident_scope: str = "permanent"
    device_budget_bytes: int | None = None
    resident: tuple[str, ...] = ()
    host: str | None = None
    pin_budget_bytes: int | None = None
    shard_within: str | None = None
    timeout_s: float = 600.0
    load_timeout_s: float = 1800.0
    strict: bool = True
    packed: bool | Literal["auto"] | None = None
    verify_packed: bool = True
    time_every: int = 8
    load_threads: int | None = None
    direct_io: bool = False

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigError: Names the setting, what was got and what is wanted.
        """
        for name in ("use_allgather", "strict", "direct_io", "verify_packed"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False; got {getattr(self, name)!r}")
        if not _is_int(self.depth) or self.depth < 2:
            raise ConfigError(
                "depth must be a whole number of at least 2 (the current block and the next "
                "one); got "
                f"{self.depth!r}"
            )
        if not _is_int(self.stages) or self.stages not in (0, 2):
            raise ConfigError(f"stages must be 2, or 0 to gather in place; got {self.stages!r}")
        if self.host is not None and self.host not in HOST_TIERS:
            known = ", ".join(map(repr, HOST_TIERS))
            raise ConfigError(f"host must be one of {known}, or None; got {self.host!r}")
        for name in ("pin_budget_bytes", "device_budget_bytes"):
            budget = getattr(self, name)
            if budget is not None and (not _is_int(budget) or budget < 0):
                raise ConfigError(
                    f"{name} must be a whole number of bytes, 0 or more, or None; got {budget!r}"
                )
        self._check_residents()
        self._check_choices()
        for name in ("timeout_s", "load_timeout_s"):
            _check_seconds(name, getattr(self, name))
        if isinstance(self.resident, str):
            raise ConfigError(
                f"resident must be a sequence of dotted names; got the string {self.resident!r}: "
                "write "
                f"({self.resident!r},)"
            )
        if not isinstance(self.resident, Iterable):
            raise ConfigError(f"resident must be a sequence of dotted names; got {self.resident!r}")
        object.__setattr__(self, "resident", tuple(self.resident))
        if not all(isinstance(name, str) and name for name in self.resident):
            raise ConfigError(f"resident must hold non-empty dotted names; got {self.resident!r}")

    def _check_residents(self) -> None:
        wanted = self.resident_layers
        if wanted != "auto" and (not _is_int(wanted) or wanted < 0):
            raise ConfigError(
                f"resident_layers must be a whole number of at least 0, or 'auto'; got {wanted!r}"
            )
        if wanted == "auto" and self.device_budget_bytes is None:
            raise ConfigError(
                "resident_layers='auto' fills a budget: give device_budget_bytes= too, the bytes "
                "that the weights may take on the device"
            )
        for name, known in (("resident_placement", PLACEMENTS), ("resident_scope", SCOPES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be {' or '.join(map(repr, known))}; got {getattr(self, name)!r}"
                )

    def _check_choices(self) -> None:
        if not isinstance(self.packed, bool) and self.packed not in ("auto", None):
            raise ConfigError(f"packed must be True, False, 'auto' or None; got {self.packed!r}")
        if not _is_int(self.time_every) or self.time_every < 0:
            raise ConfigError(
                "time_every must be a whole number of passes, of which one keeps times, or 0 for "
                f"none; got {self.time_every!r}"
            )
        if self.packed == "auto" and not 0 < self.time_every <= MOST_AUTO:
            raise ConfigError(
                f"packed='auto' chooses by the times of passes, so time_every must be 1 to "
                f"{MOST_AUTO} with it; got {self.time_every!r}"
            )
        if self.gather_by not in GATHER_MEANS:
            known = " or ".join(map(repr, GATHER_MEANS))
            raise ConfigError(f"gather_by must be {known}; got {self.gather_by!r}")
        if self.shard_within not in (None, "node"):
            raise ConfigError(f"shard_within must be 'node' or None; got {self.shard_within!r}")
        if self.shard_within and not self.use_allgather:
            raise ConfigError(
                "shard_within='node' says who shares the weights, and with use_allgather=False "
                "nobody does; leave one of the two out"
            )
        threads = self.load_threads
        if threads is not None and (not _is_int(threads) or not 1 <= threads <= _MOST_THREADS):
            raise ConfigError(
                f"load_threads must be a whole number from 1 to {_MOST_THREADS}, or None; got "
                f"{threads!r}"
            )

    @classmethod
    def of(cls, settings: dict[str, Any]) -> OffloadConfig:
        """Return the config of keyword ``settings``.

        Raises:
            ConfigError: A name is unknown or a value is refused.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown setting {', '.join(map(repr, unknown))}; known: {', '.join(known)}"
            )
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values that JSON can hold."""
        return asdict(self) | {"resident": list(self.resident)}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number of seconds; got {value!r}")
    if not 0 < value <= _LONGEST_S:
        raise ConfigError(
            f"{name} must be positive and at most {_LONGEST_S:,} seconds; got {value!r}"
        )
