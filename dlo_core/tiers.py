"""Tiers: which kinds of host memory a rank can have, what it wishes, and the store it gets."""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import TYPE_CHECKING

from dlo_core.coder import Coder
from dlo_core.dtensor import is_dtensor, shard_groups
from dlo_core.errors import ConfigError, DloWarning, HostMemoryError
from dlo_core.host import HostStore, PrivateStore, SharedStore
from dlo_core.ledger import Wish, spread
from dlo_core.mapped import PagesStore, StagedStore, why_not_mapped
from dlo_core.packed_cut import PackedCut
from dlo_core.packed_store import PackedStore
from dlo_core.pages import PageableAllocator
from dlo_core.samples import files_of, own_values, sample_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.config import OffloadConfig
    from dlo_core.interface import Backend, Capabilities
    from dlo_core.ledger import Allotment
    from dlo_core.machine import Machine
    from dlo_core.plan import ModelPlan
    from dlo_core.segment import Segment

__all__ = ["check_tier", "make_store", "make_wish"]


def check_tier(host: str | None, name: str, capabilities: Capabilities) -> None:
    """Refuse a tier that a backend can never have.

    Raises:
        ConfigError: Says which it has instead.
    """
    if host == "pinned" and not capabilities.pinned_memory:
        raise ConfigError(
            f"host='pinned' cannot be had: the backend {name!r} has no pinned memory; use "
            "host=None or 'pageable'"
        )
    if host == "shared" and not _can_share(capabilities):
        raise ConfigError(
            f"host='shared' cannot be had: the backend {name!r} cannot page-lock memory that "
            "several processes map; use host=None, 'pinned' or 'mapped'"
        )


def make_wish(
    config: OffloadConfig,
    backend: Backend,
    plans: Sequence[ModelPlan],
    *,
    rank: int,
    members: Sequence[int],
    size: int,
    gathers: bool,
    machine: Machine,
    staying: Sequence[int] = (),
) -> Wish:
    """Return what this rank wishes; nothing is allocated.

    Args:
        config: The settings.
        backend: Of the device.
        plans: The models.
        rank: In the group.
        members: Global ranks of the group, where they are processes of one job.
        size: Of the group.
        gathers: Whether the weights are sharded over it.
        machine: This rank's.
        staying: Numbers of the blocks that stay on the device, counted over all models.

    Raises:
        ConfigError: The tier that was given by name cannot be had.
    """
    sizes = tuple(shard.nbytes for plan in plans for shard in plan.shards)
    apart = "" if size == 1 else _why_apart(plans, members)
    tiers = _tiers(config, backend.capabilities, plans, gathers=gathers, apart=apart)
    return Wish(
        rank=rank,
        node=machine.node,
        tiers=tiers,
        shard_nbytes=sizes,
        staging_nbytes=2 * max(sizes),
        identity=_identity(plans) if "shared" in tiers and size > 1 else "",
        pins=backend.capabilities.pinned_memory,
        must_pin=config.host == "pinned",
        pin_budget=config.pin_budget_bytes,
        lock=machine.lock_bound() if backend.capabilities.lock_limit else None,
        bounds=machine.memory_bounds(),
        staying=frozenset(staying),
    )


def make_store(
    allotment: Allotment,
    config: OffloadConfig,
    backend: Backend,
    plans: Sequence[ModelPlan],
    *,
    rank: int,
    digest: bytes,
    segment: Segment | None,
    staying: Sequence[int] = (),
) -> HostStore:
    """Return the store that was settled, which packs what it is given where shards are packed.

    Args:
        allotment: What was settled.
        config: The settings.
        backend: Of the device.
        plans: The models.
        rank: In the shard group; 0 where nothing is gathered.
        digest: Of the trailers.
        segment: The node's memory, in the shared tier.
        staying: Numbers of the blocks that stay on the device, counted over all models.

    Raises:
        HostMemoryError: The memory cannot be had after all; nothing is kept.
    """
    store = _make_store(
        allotment,
        config,
        backend,
        plans,
        rank=rank,
        digest=digest,
        segment=segment,
        staying=staying,
    )
    if config.packed is not True:
        return store
    return PackedStore(
        store,
        Coder(backend, verify=config.verify_packed),
        [layout for plan in plans for layout in plan.layouts],
        [cut for plan in plans for cut in plan.shards if isinstance(cut, PackedCut)],
        backend=backend,
        rank=rank,
    )


def _make_store(
    allotment: Allotment,
    config: OffloadConfig,
    backend: Backend,
    plans: Sequence[ModelPlan],
    *,
    rank: int,
    digest: bytes,
    segment: Segment | None,
    staying: Sequence[int],
) -> HostStore:
    sizes = [shard.nbytes for plan in plans for shard in plan.shards]
    if allotment.tier == "shared":
        assert segment is not None
        return SharedStore(
            segment,
            sizes,
            allotment.pinned,
            allocator=backend.allocator,
            part=(allotment.local_rank, allotment.local_size),
            must_pin=config.host == "shared",
        )
    if allotment.tier == "mapped":
        return _mapped_store(allotment, config, backend, plans, rank=rank, digest=digest)
    if not backend.capabilities.pinned_memory:
        # Its own memory is the best that there is, pageable as it may be.
        return PrivateStore(backend.allocator, sizes, (True,) * len(sizes))
    must_pin = config.host == "pinned"
    return _private_store(backend, sizes, allotment.pinned, must_pin=must_pin, staying=staying)


def _private_store(
    backend: Backend,
    sizes: Sequence[int],
    pinned: Sequence[bool],
    *,
    must_pin: bool,
    staying: Sequence[int],
) -> PrivateStore:
    """Pin what was settled; where that fails and need not be, half of it, and so on."""
    wanted = left = _chosen_nbytes(sizes, pinned)
    problem: HostMemoryError | None = None
    while True:
        try:
            store = PrivateStore(backend.allocator, sizes, pinned)
            break
        except HostMemoryError as error:
            if must_pin or not any(pinned):
                raise
            problem = problem or error.with_traceback(None)
            pinned = spread(sizes, left // 2, staying)
            left = _chosen_nbytes(sizes, pinned)
    if problem is not None:
        warnings.warn(
            f"{problem}; {left:,} bytes are pinned instead of {wanted:,} and the rest is "
            "pageable: give host='pinned' to make this an error",
            DloWarning,
            stacklevel=2,
        )
    return store


def _chosen_nbytes(sizes: Sequence[int], chosen: Sequence[bool]) -> int:
    return sum(nbytes for nbytes, yes in zip(sizes, chosen, strict=True) if yes)


def _mapped_store(
    allotment: Allotment,
    config: OffloadConfig,
    backend: Backend,
    plans: Sequence[ModelPlan],
    *,
    rank: int,
    digest: bytes,
) -> HostStore:
    can = backend.capabilities
    if can.readonly_registration and config.pin_budget_bytes is None:
        try:
            return PagesStore(backend.allocator, plans, rank=rank, digest=digest)
        except HostMemoryError as error:
            warnings.warn(
                f"{error}; the checkpoint's pages go through staging buffers instead",
                DloWarning,
                stacklevel=2,
            )
    pins = all(allotment.pinned) or not can.pinned_memory
    allocator = backend.allocator if pins else PageableAllocator()
    return StagedStore(allocator, plans, rank=rank, digest=digest, timeout_s=config.timeout_s)


def _tiers(
    config: OffloadConfig,
    capabilities: Capabilities,
    plans: Sequence[ModelPlan],
    *,
    gathers: bool,
    apart: str,
) -> tuple[str, ...]:
    """Return the tiers to try, the best first; the one that was given by name, or none."""
    host = config.host
    if config.packed and host == "mapped":
        raise ConfigError(
            f"host='mapped' cannot be had with packed={config.packed!r}: the checkpoint's pages "
            "hold other bytes than travel; use host=None, 'pinned' or 'pageable'"
        )
    if config.packed == "auto" and host == "shared":
        raise ConfigError(
            "host='shared' cannot be had with packed='auto': memory that ranks share cannot change "
            "under one of them; use packed=True or False, or host=None or 'pinned'"
        )
    reason = why_not_mapped(plans) if host in (None, "mapped") else None
    if host == "shared" and gathers:
        raise ConfigError(
            "host='shared' is for ranks that each keep the whole model (use_allgather=False); in "
            "gather mode every rank keeps other bytes: use host=None, 'pinned' or 'mapped'"
        )
    if host == "shared" and apart:
        raise ConfigError(
            f"host='shared' keeps one copy a node for ranks with the same weights, but {apart}; "
            "pass topology=, which says who has the same, or use host='pinned' or 'pageable'"
        )
    if host == "mapped" and reason is not None:
        raise ConfigError(
            f"host='mapped' cannot be had: {reason}; use host=None, 'pinned' or 'pageable'"
        )
    if host is not None:
        return (host,)
    tiers = ["pinned" if capabilities.pinned_memory else "pageable"]
    shares = config.packed != "auto" and _can_share(capabilities)
    if not gathers and not apart and shares:
        tiers.append("shared")
    if reason is None and not config.packed:
        tiers.append("mapped")
    return tuple(tiers)


def _why_apart(plans: Sequence[ModelPlan], members: Sequence[int]) -> str:
    """Return why the ranks of the group have different weights; nothing where none is known."""
    for plan in plans:
        for item in plan.inventory.owned():
            if item.managed is not None:
                return f"{item.name!r} is managed by fully_shard, and each rank has its own shard"
            if not is_dtensor(item.original):
                continue
            for _, ranks in shard_groups(item.original):
                if len(set(ranks) & set(members)) > 1:
                    return (
                        f"{item.name!r} is cut by tensor parallelism over the ranks {list(ranks)}, "
                        "which each have a part"
                    )
    return ""


def _can_share(capabilities: Capabilities) -> bool:
    """Return whether shared memory is as good as the device's best."""
    return hasattr(os, "memfd_create") and (
        capabilities.host_registration or not capabilities.pinned_memory
    )


def _identity(plans: Sequence[ModelPlan]) -> str:
    """Return what is equal on two ranks of a node whose shards have equal bytes.

    Of a checkpoint it is the files themselves, for reading them to compare would be reading them
    twice; of a module, a sample of its values.
    """
    digest = hashlib.sha256()
    for plan in plans:
        digest.update(plan.digest())
        digest.update(repr(own_values(plan)).encode())
        if plan.checkpoint is None:
            digest.update(sample_values(plan))
            continue
        digest.update(files_of(plan).encode())
    return digest.hexdigest()
