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
    from torch.distributed import ProcessGroup

    from dlo_core.config import OffloadConfig
    from dlo_core.topology import Topology

    Group = ProcessGroup | Agreement

__all__ = ["ShardGroup"]


@dataclass(frozen=True, slots=True, eq=False)
class ShardGroup:
    """Which ranks shard the weights.

    Attributes:
        group: Of the ranks, as it was given or as the topology has it; None: this process alone.
        within_node: Whether only those on this node take part.
        node: Name of this process's node.
    """

    group: Group | None = None
    within_node: bool = False
    node: str = ""

    @classmethod
    def of(
        cls, config: OffloadConfig, group: Group | None, topology: Topology | None
    ) -> ShardGroup:
        """Return the shard group of a ``group`` or of a ``topology``.

        Raises:
            ConfigError: Both were given, the topology rejects the settings, or there is nothing to
                narrow to a node.
        """
        if group is not None and topology is not None:
            raise ConfigError(
                "group= and topology= were both given, but the shard group follows from the "
                "topology; pass one of them"
            )
        node = socket.gethostname()
        if topology is not None:
            group = topology.group_for(use_allgather=config.use_allgather)
            node = topology.node
        within = config.shard_within == "node"
        if within and group is None and topology is None:
            raise ConfigError(
                "shard_within='node' needs topology= or group=: without one there is no shard "
                "group to narrow"
            )
        return cls(group, within, node)

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
            return LoneAgreement()
        if isinstance(group, Agreement):
            if self.within_node:
                raise ConfigError("shard_within='node' needs a process group")
            return group
        member = check_member(group)
        if dist.get_world_size(member) == 1:
            return LoneAgreement()
        whole = GroupAgreement(member, timeout_s, patience_s)
        try:
            told = whole.exchange((self.within_node, self.node), "offload()")
            if len({within for within, _ in told}) > 1:
                raise AgreementError(
                    "offload(): the ranks of the group differ in shard_within: "
                    + ", ".join(
                        f"rank {r} has {'node' if w else None}" for r, (w, _) in enumerate(told)
                    )
                    + ". Give every rank the same settings"
                )
        except BaseException:
            whole.close()
            raise
        if not self.within_node:
            return whole
        whole.close()
        members = split_by_node(whole.members, [node for _, node in told], self.node)
        if len(members) == 1:
            return LoneAgreement()
        return GroupAgreement(members, timeout_s, patience_s)
