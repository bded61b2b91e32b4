"""The salvage: the host shards of an offload that failed, kept for the one that comes after it.

What a failure breaks is the way between the ranks; the bytes on the host are what they were. The
next offload takes them over without reading the checkpoint, if they are the bytes that it would
read: the same layouts, cut for the same rank of as many, of the same values, and unchanged since
they were read.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from dlo_core.errors import ConfigError
from dlo_core.host import PrivateStore
from dlo_core.source import ModuleTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlo_core.host import HostStore
    from dlo_core.plan import ModelPlan

__all__ = ["Salvage", "fingerprint", "keep_remainders"]

_CHUNK = 8192


def fingerprint(store: HostStore) -> bytes | None:
    """Return what tells the bytes of a store from others; None where nothing can be salvaged."""
    if not isinstance(store, PrivateStore):
        return None
    digest = hashlib.sha256()
    with torch.inference_mode(False), torch.no_grad():
        for index in range(len(store.tiers)):
            for at, part in store.parts(index):
                words = part[: part.nbytes // 8 * 8].view(torch.int64)
                whole = words[: words.numel() // _CHUNK * _CHUNK].view(-1, _CHUNK)
                digest.update(f"{index}|{at}|{part.nbytes}|".encode())
                digest.update(whole.sum(dim=1).numpy().tobytes())
                rest = part[whole.numel() * 8 :]
                digest.update(rest.numpy().tobytes())
    return digest.digest()


class Salvage:
    """The host shards of one rank, and what they are."""

    def __init__(
        self,
        store: HostStore,
        expected: bytes | None,
        *,
        digest: bytes,
        samples: Mapping[str, str],
        place: tuple[int, int],
        host: tuple[str | None, int | None],
        lost: str,
    ) -> None:
        """Take a store over.

        Args:
            store: The shards.
            expected: Their fingerprint, as they were read.
            digest: Of the layouts.
            samples: Facts about the values.
            place: Rank in the group, and its size.
            host: The tier and the budget that were asked for.
            lost: Why they are not what the checkpoint has any more; empty: they are.
        """
        self._store: HostStore | None = store
        self._expected = expected
        self._digest = digest
        self.samples = dict(samples)
        self._place = place
        self._host = host
        self._lost = lost

    def check(self) -> None:
        """Refuse weights that reading anew would silently undo.

        Raises:
            ConfigError: They were updated.
        """
        if self._lost:
            raise ConfigError(f"reuse= cannot be honoured: {self._lost}")

    def why_not(
        self,
        *,
        digest: bytes,
        samples: Mapping[str, str],
        place: tuple[int, int],
        host: tuple[str | None, int | None],
    ) -> str:
        """Return why the next offload cannot take the shards; empty: it can.

        Args:
            digest: As in the constructor, of the next one.
            samples: Likewise.
            place: Likewise.
            host: Likewise.
        """
        (rank, size), (was, of) = place, self._place
        kind = type(self._store).__name__
        reasons = (
            (self._store is None, "another offload took the shards already"),
            (
                place != self._place,
                f"they are those of rank {was} of {of}, and this is rank {rank} of {size}",
            ),
            (
                digest != self._digest,
                "the model, its blocks, what is resident or how it is read (checkpoint=, key_map=, "
                "transforms=) is not the same",
            ),
            (
                dict(samples) != self.samples,
                "the checkpoint is another one or has changed, or the model has other values",
            ),
            (host != self._host, "another kind of host memory is asked for"),
            (self._expected is None, f"{kind} keeps no bytes that this rank alone could pass on"),
        )
        for applies, reason in reasons:
            if applies:
                return reason
        if fingerprint(self.store) != self._expected:
            return "they are not the bytes that were read: something has written over them"
        return ""

    @property
    def store(self) -> HostStore:
        """The shards."""
        assert self._store is not None
        return self._store

    def hand_over(self) -> None:
        """Give the shards to the next offload, which releases them from now on."""
        self._store = None

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.release()

    def __repr__(self) -> str:
        """Show whose the shards are."""
        rank, size = self._place
        return f"Salvage(rank {rank} of {size}, {self._store or 'nothing any more'})"


def keep_remainders(plans: Sequence[ModelPlan], hosts: Sequence[torch.Tensor]) -> None:
    """Write what stays on the device to ``hosts``: what the models have, or else from its source.

    Args:
        plans: The models.
        hosts: Host memory, one run a plan.
    """
    for plan, host in zip(plans, hosts, strict=True):
        rows = zip(plan.inventory.remainder, plan.remainder.tensors, strict=True)
        for item, spec in rows:
            part = host[spec.offset : spec.offset + spec.nbytes]
            has_values = not item.tensor.is_meta
            source = ModuleTensor(item.tensor) if has_values else plan.sources[item.name]
            source.read(spec, 0, spec.nbytes, part)
