"""Gathering: by which means, the comm library's kernels or the device's copy engines."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dlo_core.collective import release_group
from dlo_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from dlo_core.agreement import Agreement
    from dlo_core.config import OffloadConfig
    from dlo_core.interface import Backend, Collective

__all__ = ["check_means", "check_one_node", "make_collective", "make_group"]

# Of a comm library, beyond the watch's own deadline.
_SPARE_S = 60.0
_REMEDY = "use gather_by='kernels'"


def check_means(config: OffloadConfig, backend: Backend, *, gathers: bool) -> None:
    """Refuse gathers by copies where the backend has none.

    Raises:
        ConfigError: Names what is missing.
    """
    if gathers and config.gather_by == "copies":
        reason = backend.copies_refusal()
        if reason is not None:
            raise ConfigError(
                f"gather_by='copies' cannot be had on {str(backend.device)!r}: {reason}; {_REMEDY}"
            )


def check_one_node(nodes: Sequence[str]) -> None:
    """Refuse ranks of several nodes, whose copy engines do not reach each other.

    Args:
        nodes: Of every rank, in rank order.

    Raises:
        ConfigError: They are more than one.
    """
    other = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), None)
    if other is not None:
        raise ConfigError(
            "gather_by='copies' needs all ranks of the shard group on one node; rank 0 is on "
            f"{nodes[0]!r} and rank {other} on {nodes[other]!r}: {_REMEDY}, or "
            "shard_within='node'"
        )


def make_collective(config: OffloadConfig, backend: Backend, agreement: Agreement) -> Collective:
    """Make the weights group and its collective, or neither; all ranks must call this.

    Raises:
        AgreementError: The ranks could not connect.
    """
    limit_s = config.timeout_s
    if not backend.capabilities.host_blocks:
        # The watch comes first: a comm library of a device whose own limit is over may end the
        # whole process.
        limit_s = 2 * limit_s + _SPARE_S
    copies = config.gather_by == "copies"
    options = backend.copies_options(limit_s) if copies else None
    made = make_group(backend, lambda: agreement.new_group(backend.comm_library, limit_s, options))
    try:
        return backend.copies_collective(made) if copies else backend.collective(made)
    except BaseException:
        release_group(made)
        raise


def make_group(backend: Backend, make: Callable[[], ProcessGroup]) -> ProcessGroup:
    """Return what ``make`` returns, under the environment that the backend's groups need."""
    with _saying(backend.group_environment()):
        return make()


@contextmanager
def _saying(values: Mapping[str, str]) -> Iterator[None]:
    """Have the environment say ``values``, and afterwards what it said before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
