"""A managed parameter: one that torch's ``fully_shard`` (FSDP2, HSDP) shards and gathers itself.

dlo never shards it a second time. What streams is this rank's part, the padded flat run from which
FSDP gathers. Neither the entry in the module's table nor ``_local_tensor.data`` has any effect on
that gather; FSDP reads a private attribute of its own record of the parameter, and that is what is
repointed here.

[Note: who gathers when]
FSDP gathers in the block's pre-forward hook, on a stream of its own that waits for nothing of ours.
So bind gathers first, by the public ``unshard()``: outside of FSDP's own forward it runs on the
current stream, which has waited for the slot. The hook then finds that all is there. Unbind
reshards, which frees the gathered weights whatever ``reshard_after_forward`` says.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlo_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["ManagedBinding", "ManagedParameter", "check_prefetch", "find_managed", "is_managed"]

_MODULE = "torch.distributed.fsdp"
_NEEDS = ("_sharded_param_data", "sharded_param", "padded_sharded_param_size", "_module_info")


class ManagedParameter:
    """One parameter of ``fully_shard`` and where FSDP keeps this rank's part of it."""

    def __init__(self, unit: nn.Module, record: Any) -> None:
        """Take FSDP's record of a parameter that ``unit`` gathers."""
        self.unit = unit
        self._record = record
        info = record._module_info
        modules = (info.module, *info.shared_modules)
        names = (info.param_name, *info.shared_param_names)
        self.places = [
            (id(module._parameters), name) for module, name in zip(modules, names, strict=True)
        ]

    @property
    def parameter(self) -> torch.Tensor:
        """The sharded parameter, a DTensor."""
        made: torch.Tensor = self._record.sharded_param
        return made

    @property
    def data(self) -> torch.Tensor:
        """This rank's part, flat, with FSDP's padding: what FSDP gathers."""
        run: torch.Tensor = self._record._sharded_param_data
        return run

    def point_at(self, run: torch.Tensor) -> None:
        """Let FSDP gather from ``run``, flat and padded, and the parameter show it."""
        local = run.view(self._record.padded_sharded_param_size)
        dim = self._record.fsdp_placement.dim
        self._record._sharded_param_data = run
        local = local.narrow(dim, 0, self._record.sharded_size[dim])
        self._record.sharded_param._local_tensor = local

    def replace(self, placeholder: torch.Tensor) -> None:
        """Leave ``placeholder`` in the place of the values."""
        self._record._sharded_param_data = placeholder
        self._record.sharded_param._local_tensor = placeholder

    def check(self, name: str, model: nn.Module) -> None:
        """Refuse what cannot stream.

        Raises:
            ConfigError: Names the parameter and the remedy.
        """
        record = self._record
        problem = None
        if record.is_dtensor:
            problem = (
                "is sharded by HSDP on top of tensor parallelism, a combination that is rejected; "
                "use one of the two"
            )
        elif record.offload_to_cpu:
            problem = (
                "is offloaded by FSDP itself (CPUOffloadPolicy); leave one of the two out: "
                "fully_shard() without offload_policy=, or no offload()"
            )
        elif hasattr(self.parameter._local_tensor, "fsdp_pre_all_gather"):  # type: ignore[attr-defined]
            problem = "has an all-gather extension of its own; dequantise it, or leave it out"
        elif type(self.data) is not torch.Tensor:
            problem = (
                "has no values, for they were released when its offload ended (shutdown(), or "
                "disable(to='meta')); load the model anew"
            )
        elif self.parameter.is_meta or self.data.is_meta:
            problem = (
                "is managed by fully_shard and has no values; HSDP's parameters come from the "
                "ordinary loader: load them before offload()"
            )
        if problem:
            raise ConfigError(f"{name!r} of {type(model).__name__} {problem}")

    def settle(self) -> None:
        """Free what is gathered, and let FSDP look at its parameters for the last time.

        FSDP does so once, before it first gathers, and then goes by what it has seen.
        """
        unit: Any = self.unit
        unit.reshard()
        for group in _groups(self.unit):
            group.lazy_init()


class ManagedBinding:
    """The managed parameters of one block, bound and unbound together."""

    def __init__(
        self, block: nn.Module, parameters: Sequence[tuple[int, ManagedParameter]]
    ) -> None:
        """Take the parameters, each with its number in the block."""
        self._parameters = tuple(parameters)
        units = {id(managed.unit): managed.unit for _, managed in parameters}
        # In the order of the modules, so that all ranks gather in the same order.
        self._units: tuple[Any, ...] = tuple(m for m in block.modules() if id(m) in units)

    def attach(self, placeholders: Sequence[torch.Tensor]) -> None:
        """Put the placeholders in."""
        for number, managed in self._parameters:
            managed.replace(placeholders[number])

    def bind(self, views: Sequence[torch.Tensor], placeholders: Sequence[torch.Tensor]) -> None:
        """Let FSDP gather from the slot. See [Note: who gathers when]."""
        try:
            for number, managed in self._parameters:
                managed.point_at(views[number])
            for unit in self._units:
                unit.unshard()
        except BaseException:
            self.attach(placeholders)
            raise

    def unbind(self, placeholders: Sequence[torch.Tensor]) -> None:
        """Free what was gathered and put the placeholders back."""
        for unit in self._units:
            unit.reshard()
        self.attach(placeholders)


def find_managed(model: nn.Module) -> list[ManagedParameter]:
    """Return the parameters of ``model`` that ``fully_shard`` manages; none where it is not used.

    Raises:
        ConfigError: This release of torch keeps them in a way that dlo does not know.
    """
    # Modules that were given to one fully_shard() call share their records.
    found: dict[int, ManagedParameter] = {}
    for unit in _units(model):
        for group in _groups(unit):
            for record in group.fsdp_params:
                found.setdefault(id(record), ManagedParameter(unit, record))
    return list(found.values())


def check_prefetch(model: nn.Module) -> None:
    """Refuse explicit prefetching, which gathers a block before it is in its slot.

    Raises:
        ConfigError: Names the module.
    """
    for unit in _units(model):
        if unit._get_fsdp_state()._states_to_forward_prefetch:
            raise ConfigError(
                f"a {type(unit).__name__} gathers others ahead (set_modules_to_forward_prefetch), "
                "before dlo has brought their weights; take that call out: dlo prefetches itself"
            )


def is_managed(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to ``module`` itself."""
    package = sys.modules.get(_MODULE)
    return package is not None and isinstance(module, package.FSDPModule)


def _units(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if is_managed(module))


def _groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    for record in (record for group in groups for record in group.fsdp_params):
        missing = [name for name in _NEEDS if not hasattr(record, name)]
        if missing:
            raise ConfigError(
                f"parameters of fully_shard cannot stream with torch {torch.__version__}: its "
                f"records lack {', '.join(missing)}; offload() a model without fully_shard, or use "
                "HSDP alone"
            )
    return list(groups)
