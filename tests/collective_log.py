"""A log of all collectives that one rank issues, the model's own and dlo's, in one order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from poison import PoisonBackend, PoisonCollective
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CollectiveLog", "LoggedBackend"]

_WAITS = ("wait_tensor",)


class CollectiveLog(TorchDispatchMode):
    """Writes down each collective that goes through torch's dispatcher in this thread.

    Attributes:
        entries: (whose, name of the operation, bytes), in the order of issue. Whose: ``"model"``,
            ``"dlo"`` for gathers of weights, ``"control"`` for what dlo's ranks tell each other.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[tuple[str, str, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and name not in _WAITS:
            whose = "control" if _is_ours(args) else "model"
            # What the control group carries is as long as what there is to say.
            self.entries.append((whose, name, _nbytes(args) if whose == "model" else 0))
        return func(*args, **(kwargs or {}))


class LoggedBackend(PoisonBackend):
    """The poisoned CPU backend, whose gathers are written down when the host issues them."""

    def __init__(self, log: CollectiveLog) -> None:
        super().__init__()
        self._log = log

    def collective(self, group: ProcessGroup) -> PoisonCollective:
        """Return a gather that is logged."""
        made = PoisonCollective(group, self.delay_s)
        gather = made.all_gather

        def logged(out: torch.Tensor, shard: torch.Tensor) -> None:
            self._log.entries.append(("dlo", "all_gather", out.nbytes))
            gather(out, shard)

        made.all_gather = logged  # type: ignore[method-assign]
        return made


def _is_ours(args: tuple[Any, ...]) -> bool:
    groups = [
        dist.ProcessGroup.unbox(a)
        for a in args
        if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
    ]
    return any(group.group_name.startswith("dlo-") for group in groups)


def _nbytes(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return int(values.nbytes)
    return sum(map(_nbytes, values)) if isinstance(values, list | tuple) else 0
