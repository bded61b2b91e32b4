"""The shard group: the ranks that share one model's weights, before they have met."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from dlo_core.agreement import Agreement, GroupAgreement, LoneAgreement, check_member
from dlo_core.errors import AgreementError, ConfigError
from dlo_core.parallel import split_by_node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from dlo_core.config import OffloadConfig
    from dlo_core.topology import Topology

    Group = ProcessGroup | Agreement

__all__ = ["ShardGroup", "reach"]


@dataclass(frozen=True, slots=True, eq=False)
class ShardGroup:
    """Which ranks shard the weights.

    Attributes:
        group: Of the ranks, as it was given or as the topology has it; None: this process alone.
        within_node: Whether only those on this node take part.
        node: Name of this process's node.
        settings: What the ranks of ``peers`` must have alike, by name.
        peers: The topology's groups of ranks that have the same weights, the one first that shards
            them in gather mode.
        shares: Whether all ranks that ``peers`` reach share one copy a node, without ``group``.
    """

    group: Group | None = None
    within_node: bool = False
    node: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    peers: tuple[ProcessGroup, ...] = ()
    shares: bool = False

    @classmethod
    def of(
        cls, config: OffloadConfig, group: Group | None, topology: Topology | None
    ) -> ShardGroup:
        """Return the shard group of a ``group`` or of a ``topology``.

        Raises:
            ConfigError: Both were given, the topology rejects the settings, or there is nothing to
                narrow to a node or to share.
        """
        if group is not None and topology is not None:
            raise ConfigError(
                "group= and topology= were both given, but the shard group follows from the "
                "topology; pass one of them"
            )
        within = config.shard_within == "node"
        if topology is not None:
            return cls._of_topology(config, topology)
        node = socket.gethostname()
        if within and group is None:
            raise ConfigError(
                "shard_within='node' needs topology= or group=: without one there is no shard "
                "group to narrow"
            )
        return cls(group, within, node, (("shard_within", str(config.shard_within)),))

    @classmethod
    def _of_topology(cls, config: OffloadConfig, topology: Topology) -> ShardGroup:
        group = topology.group_for(use_allgather=config.use_allgather)
        shares = config.host == "shared" and not config.use_allgather
        if shares and topology.sizes.has_hsdp:
            raise ConfigError(
                "host='shared' keeps one copy a node for ranks with the same weights, and HSDP's "
                "ranks hold different shards; use host='pinned' or 'pageable'"
            )
        # Not TP: its ranks have different weights.
        peers = [each for each in (topology.dp, topology.sp) if each is not None]
        return cls(
            group,
            config.shard_within == "node",
            topology.node,
            (
                ("use_allgather", str(config.use_allgather)),
                ("shard_within", str(config.shard_within)),
                ("host='shared'", str(shares)),
            ),
            tuple(each for each in peers if dist.get_world_size(each) > 1),
            shares,
        )

    def compare(self, timeout_s: float) -> None:
        """Refuse ranks of a topology that would share weights and differ in the settings.

        For ranks without ``group``; those that gather compare when they meet.

        Raises:
            AgreementError: They differ, or a rank did not come within ``timeout_s``.
        """
        if self.peers and self.group is None:
            reach(self.peers[:1], self.settings, timeout_s)

    def meet(self, timeout_s: float, patience_s: float | None = None) -> Agreement:
        """Return how the ranks agree; all of ``group`` must call this.

        Args:
            timeout_s: How long they wait for each other.
            patience_s: How long they wait for the store of the job; None: as long.

        Raises:
            ConfigError: This process is not in the group.
            AgreementError: A rank did not come within ``timeout_s``, or the ranks differ in
                ``within_node``.
        """
        group = self.group
        if group is None:
            return self._meet_sharers(timeout_s, patience_s)
        if isinstance(group, Agreement):
            if self.within_node:
                raise ConfigError("shard_within='node' needs a process group")
            return group
        member = check_member(group)
        if dist.get_world_size(member) == 1:
            return LoneAgreement()
        whole = GroupAgreement(member, timeout_s, patience_s)
        try:
            mine = {dist.get_rank(): dict(self.settings) | {"node": self.node}}
            told = _joined(whole.exchange(mine, "offload()"), self.settings, "offload()")
        except BaseException:
            whole.close()
            raise
        if not self.within_node:
            return whole
        whole.close()
        nodes = [told[rank]["node"] for rank in whole.members]
        members = split_by_node(whole.members, nodes, self.node)
        if len(members) == 1:
            return LoneAgreement()
        return GroupAgreement(members, timeout_s, patience_s)

    def _meet_sharers(self, timeout_s: float, patience_s: float | None) -> Agreement:
        """Return how the ranks agree that share one copy a node, where any do."""
        if not self.shares or not self.peers:
            return LoneAgreement()
        return GroupAgreement(reach(self.peers, self.settings, timeout_s), timeout_s, patience_s)


def reach(
    groups: Sequence[ProcessGroup],
    settings: Sequence[tuple[str, str]],
    timeout_s: float,
    what: str = "offload()",
) -> tuple[int, ...]:
    """Return the global ranks that ``groups`` reach from here, whose ``settings`` are the same.

    Args:
        groups: One a dimension, in the same order on every rank; all their ranks must call this.
        settings: Names and values.
        timeout_s: How long to wait for the others.
        what: Names the exchange in errors.

    Raises:
        AgreementError: The settings differ, on every rank that was reached; or a rank did not come.
    """
    told: dict[int, dict[str, str]] = {dist.get_rank(): dict(settings)}
    # Each step adds what the peers of one more dimension know: a grid is whole after all of them.
    for group in groups:
        step = GroupAgreement(group, timeout_s)
        try:
            told = _joined(step.exchange(told, what), settings, what)
        finally:
            step.close()
    return tuple(sorted(told))


def _joined(
    answers: Sequence[dict[int, dict[str, str]]], settings: Sequence[tuple[str, str]], what: str
) -> dict[int, dict[str, str]]:
    """Return what every rank told, by global rank; raise where the ``settings`` differ."""
    told = {rank: theirs for answer in answers for rank, theirs in answer.items()}
    for name, _ in settings:
        if len({theirs.get(name) for theirs in told.values()}) > 1:
            values = ", ".join(f"rank {rank} has {told[rank].get(name)}" for rank in sorted(told))
            raise AgreementError(
                f"{what}: the ranks, by global rank, differ in {name}: {values}. Give every rank "
                "the same settings"
            )
    return told
