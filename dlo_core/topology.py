"""A topology: the parallel groups that a job has, from which follows who shards the weights."""

from __future__ import annotations

import itertools
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlo_core.agreement import check_member
from dlo_core.errors import ConfigError
from dlo_core.parallel import Dim, Sizes, choose
from dlo_core.topology_report import TopologyReport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Topology"]


class Topology:
    """The data-, sequence- and tensor-parallel groups of this rank, and those of HSDP.

    It uses groups that exist and makes none; only ``from_sizes`` does, for scripts. The weights
    are sharded over the DP group where it has more than one rank, else over the SP group, else
    not at all; never over TP. HSDP goes with ``use_allgather=False`` only, and neither with DP nor
    with TP.
    """

    def __init__(
        self,
        groups: dict[Dim, ProcessGroup],
        *,
        hsdp: tuple[ProcessGroup | None, ProcessGroup | None] = (None, None),
        mesh: DeviceMesh | None = None,
        hsdp_mesh: DeviceMesh | None = None,
        node: str | None = None,
    ) -> None:
        """Take groups that were checked; use ``from_mesh``, ``from_groups`` or ``from_sizes``."""
        self._groups = groups
        self._hsdp = hsdp
        self._mesh = mesh
        self._hsdp_mesh = hsdp_mesh
        self._node = socket.gethostname() if node is None else node
        self._sizes = Sizes(
            **{dim.value: dist.get_world_size(group) for dim, group in groups.items()},
            hsdp=(_size(hsdp[0]), _size(hsdp[1])),
        )
        self._check_apart()

    # --- where it comes from ----------------------------------------------------------------------

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        dp: str | None = None,
        sp: str | None = None,
        tp: str | None = None,
        hsdp: str | tuple[str, str] | None = None,
        node: str | None = None,
    ) -> Topology:
        """Return the topology of a device mesh.

        Args:
            mesh: Has names for its dimensions; this rank is in it.
            dp: Name of the data-parallel dimension.
            sp: Name of the sequence-parallel dimension.
            tp: Name of the tensor-parallel dimension.
            hsdp: Names of the replicating and the sharding dimension of ``fully_shard``; one name:
                the sharding one.
            node: Name of this rank's node; None: the host name.

        Raises:
            ConfigError: There is no such dimension, one stands for two things, this rank is not in
                the mesh, or the combination is always rejected.
        """
        replicate, shard = (None, hsdp) if isinstance(hsdp, str) or hsdp is None else hsdp
        _check_distinct({"dp": dp, "sp": sp, "tp": tp})
        if mesh.get_coordinate() is None:
            raise ConfigError(f"this process (global rank {dist.get_rank()}) is not in the mesh")
        groups = {
            dim: _group_of(mesh, dim.value, name)
            for dim, name in ((Dim.DP, dp), (Dim.SP, sp), (Dim.TP, tp))
            if name is not None
        }
        pair = [
            None if name is None else _group_of(mesh, "hsdp", name) for name in (replicate, shard)
        ]
        return cls(groups, hsdp=(pair[0], pair[1]), mesh=mesh, node=node)

    @classmethod
    def from_groups(
        cls,
        *,
        dp: ProcessGroup | None = None,
        sp: ProcessGroup | None = None,
        tp: ProcessGroup | None = None,
        hsdp: ProcessGroup | tuple[ProcessGroup | None, ProcessGroup] | None = None,
        node: str | None = None,
    ) -> Topology:
        """Return the topology of process groups, each the one that this rank is in.

        Args:
            dp: Data-parallel group.
            sp: Sequence-parallel group.
            tp: Tensor-parallel group.
            hsdp: Replicating and sharding group of ``fully_shard``, or the sharding one.
            node: Name of this rank's node; None: the host name.

        Raises:
            ConfigError: This process is not in a group, two groups share more than this rank, or
                the combination is always rejected.
        """
        given = ((Dim.DP, dp), (Dim.SP, sp), (Dim.TP, tp))
        groups = {dim: check_member(group) for dim, group in given if group is not None}
        replicate, shard = hsdp if isinstance(hsdp, tuple) else (None, hsdp)
        for group in (replicate, shard):
            if group is not None:
                check_member(group)
        return cls(groups, hsdp=(replicate, shard), node=node)

    @classmethod
    def from_sizes(
        cls,
        *,
        dp: int = 1,
        sp: int = 1,
        tp: int = 1,
        hsdp: tuple[int, int] = (1, 1),
        device_type: str | None = None,
        node: str | None = None,
    ) -> Topology:
        """Make device meshes of these sizes over the whole job, and return their topology.

        TP ranks are neighbours, then SP, then DP. With HSDP the meshes are two: replicas by
        shards, and the SP groups among the same ranks, neighbours too.

        Args:
            dp: Data-parallel ranks.
            sp: Sequence-parallel ranks.
            tp: Tensor-parallel ranks.
            hsdp: Replicas of ``fully_shard``, and ranks that shard one.
            device_type: Of the meshes; None: the accelerator's that torch has, else ``"cpu"``.
            node: Name of this rank's node; None: the host name.

        Raises:
            ConfigError: The sizes do not give the number of ranks, or are always rejected; no group
                was made.
        """
        from torch.distributed.device_mesh import init_device_mesh

        sizes = Sizes(dp, sp, tp, hsdp)
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("from_sizes() needs init_process_group() to be called first")
        world = dist.get_world_size()
        if sizes.world != world:
            raise ConfigError(
                f"{sizes} makes {sizes.world} ranks, but the job has {world}; choose sizes whose "
                "product is the number of processes"
            )
        device_type = device_type or _accelerator_type()
        hsdp_mesh = None
        pair: tuple[ProcessGroup | None, ProcessGroup | None] = (None, None)
        outer, names = (dp, sp, tp), ("dp", "sp", "tp")
        if sizes.has_hsdp:
            hsdp_mesh = init_device_mesh(
                device_type, sizes.hsdp, mesh_dim_names=("replicate", "shard")
            )
            pair = (hsdp_mesh.get_group("replicate"), hsdp_mesh.get_group("shard"))
            outer, names = (world // sp, sp, 1), ("rest", "sp", "tp")
        mesh = init_device_mesh(device_type, outer, mesh_dim_names=names)
        groups = {dim: mesh.get_group(dim.value) for dim in Dim if dim.value in names}
        return cls(groups, hsdp=pair, mesh=mesh, hsdp_mesh=hsdp_mesh, node=node)

    # --- what it says -----------------------------------------------------------------------------

    @property
    def sizes(self) -> Sizes:
        """Ranks of each dimension."""
        return self._sizes

    @property
    def node(self) -> str:
        """Name of this rank's node."""
        return self._node

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh that it came from or made, for ``parallelize_module`` and the like."""
        return self._mesh

    @property
    def hsdp_mesh(self) -> DeviceMesh | None:
        """The mesh of replicas by shards that ``from_sizes`` made, for ``fully_shard``."""
        return self._hsdp_mesh

    @property
    def dp(self) -> ProcessGroup | None:
        """The data-parallel group."""
        return self._groups.get(Dim.DP)

    @property
    def sp(self) -> ProcessGroup | None:
        """The sequence-parallel group."""
        return self._groups.get(Dim.SP)

    @property
    def tp(self) -> ProcessGroup | None:
        """The tensor-parallel group."""
        return self._groups.get(Dim.TP)

    @property
    def tp_rank(self) -> int:
        """This rank's place in the tensor-parallel group; 0 without one."""
        return 0 if self.tp is None else dist.get_rank(self.tp)

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The group over which weights are sharded in gather mode; None: rank-local.

        Raises:
            ConfigError: Gather mode is rejected; holds the reason and the remedy.
        """
        return self.group_for(use_allgather=True)

    def group_for(self, *, use_allgather: bool) -> ProcessGroup | None:
        """Return the shard group; without the all-gather there is none.

        Raises:
            ConfigError: The combination is rejected; holds the reason and the remedy.
        """
        choice = choose(self._sizes, use_allgather=use_allgather)
        return None if choice.dim is None else self._groups[choice.dim]

    def describe(
        self, *, use_allgather: bool = True, shard_within: str | None = None
    ) -> TopologyReport:
        """Return who this rank shards with, and why; ``str()`` of it is text.

        Args:
            use_allgather: As in ``OffloadConfig``.
            shard_within: As in ``OffloadConfig``. Where the other ranks' nodes are is known when
                they meet, so the report says the whole group.
        """
        used = {dim: group for dim, group in self._groups.items() if _size(group) > 1}
        groups = {dim: tuple(dist.get_process_group_ranks(group)) for dim, group in used.items()}
        if self._hsdp[1] is not None:
            groups[Dim.HSDP] = tuple(dist.get_process_group_ranks(self._hsdp[1]))
        rank = dist.get_rank()
        return TopologyReport.of(
            self._sizes,
            [(rank, self._node, groups)],
            use_allgather=use_allgather,
            shard_within=shard_within,
            nodes={},
        )

    def __repr__(self) -> str:
        """Show the sizes."""
        return f"Topology({self._sizes})"

    def _check_apart(self) -> None:
        """Refuse groups of two dimensions that share more than this rank."""
        ranks = {d: set(dist.get_process_group_ranks(g)) for d, g in self._groups.items()}
        for (first, some), (second, others) in itertools.combinations(ranks.items(), 2):
            both = sorted(some & others)
            if len(both) > 1:
                raise ConfigError(
                    f"the {first.value} and the {second.value} group of rank {dist.get_rank()} "
                    f"share the ranks {both}; two dimensions have one rank in common, this one"
                )


def _group_of(mesh: DeviceMesh, what: str, name: str) -> ProcessGroup:
    """Return the group of a dimension of the mesh."""
    names = mesh.mesh_dim_names or ()
    if name not in names:
        raise ConfigError(
            f"{what}={name!r} is no dimension of the mesh, which has {list(names)}; of a dimension "
            "that was flattened from several pass the group, to from_groups()"
        )
    return mesh.get_group(name)


def _size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _check_distinct(names: dict[str, str | None]) -> None:
    seen: dict[Any, str] = {}
    for what, name in names.items():
        if name is not None and name in seen:
            raise ConfigError(
                f"{seen[name]}={name!r} and {what}={name!r} are one dimension of the mesh; name "
                "another for one of them"
            )
        seen[name] = what


def _accelerator_type() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type
