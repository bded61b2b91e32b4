"""The registry: which backends are installed, found by entry point, each on its own and late.

Only this file knows backend names. The entry point's name is the torch device type; the object
that it names has a ``dlo_backend`` hook implementation. One plug-in that fails never hides
another, and its reason is kept for ``dlo info``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

from dlo_core._install import install_command
from dlo_core.errors import BackendError
from dlo_core.interface import Backend

if TYPE_CHECKING:
    import torch

__all__ = ["BackendStatus", "device_type", "get_backend", "hookimpl", "installed", "resolve"]

GROUP = "dlo"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)

_OURS = frozenset({"cpu", "cuda", "npu"})


class _Spec:
    """The one hook of the entry-point group."""

    @hookspec(firstresult=True)
    def dlo_backend(self, device: str) -> Backend:  # type: ignore[empty-body]
        """Return a backend for ``device``, a device type with or without ``":"`` and an index.

        Raises:
            BackendError: This machine cannot run it; the message is the reason.
        """


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """What the registry knows of one entry point.

    Attributes:
        name: The torch device type.
        distribution: The installed distribution that ships it, with its version.
        reason: Why it cannot be used, or None when it can.
        backend: A backend for the type's default device, or None.
    """

    name: str
    distribution: str
    reason: str | None
    backend: Backend | None


def device_type(device: str | torch.device) -> str:
    """Return the part of ``device`` before ``":"``, without asking torch.

    ``torch.device()`` raises for a type whose extension is not imported, so torch must not see
    the name before the backend did.
    """
    return str(device).partition(":")[0]


def installed() -> tuple[BackendStatus, ...]:
    """Return the status of every entry point of the group, in the order of their names."""
    points = _points()
    return tuple(_status(point, points) for point in sorted(points, key=lambda point: point.name))


def get_backend(device: str | torch.device) -> Backend:
    """Return a backend for ``device``, loading only the plug-in that its type names.

    Raises:
        BackendError: No entry point has this device type, or its plug-in cannot be loaded, or the
            machine cannot run it.
    """
    name = device_type(device)
    points = [point for point in _points() if point.name == name]
    if not points:
        known = ", ".join(sorted({point.name for point in _points()})) or "none"
        raise BackendError(
            f"no backend for device {str(device)!r}; installed: {known}{_hint(name)}"
        )
    return _load(_only(points), str(device))


def resolve(device: str | torch.device | Backend) -> Backend:
    """Return ``device`` itself when it is a backend, else the backend that it names."""
    return device if isinstance(device, Backend) else get_backend(device)


def _points() -> list[metadata.EntryPoint]:
    """Return the group's entry points; a distribution listed twice on the path counts once."""
    seen = dict.fromkeys(metadata.entry_points(group=GROUP))
    return list({(point.name, point.value): point for point in seen}.values())


def _load(point: metadata.EntryPoint, device: str) -> Backend:
    plugin = _import(point)
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(_Spec)
    try:
        manager.register(plugin, name=point.name)
        manager.check_pending()
        backend = manager.hook.dlo_backend(device=device)
    except BackendError:
        raise
    except (Exception, SystemExit) as error:
        raise BackendError(
            f"the backend {point.name!r} of {_distribution(point)} failed for device {device!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(backend, Backend):
        raise BackendError(
            f"the plug-in {point.name!r} of {_distribution(point)} ({point.value}) gave "
            f"{backend!r} for device {device!r}; its dlo_backend hook must return a "
            "dlo_core.interface.Backend (is the function marked with dlo_core.hookimpl?)"
        )
    return backend


def _import(point: metadata.EntryPoint) -> Any:
    try:
        return point.load()
    # A plug-in may fail on import in any way: a missing library is an OSError, some exit.
    except (Exception, SystemExit) as error:
        raise BackendError(
            f"the backend {point.name!r} of {_distribution(point)} cannot be imported "
            f"({point.value}): {type(error).__name__}: {error}{_hint(point.name)}"
        ) from error


def _status(point: metadata.EntryPoint, points: list[metadata.EntryPoint]) -> BackendStatus:
    try:
        same = _only([other for other in points if other.name == point.name])
        backend = _load(same, point.name)
    except BackendError as error:
        return BackendStatus(point.name, _distribution(point), str(error), None)
    return BackendStatus(point.name, _distribution(point), None, backend)


def _only(points: list[metadata.EntryPoint]) -> metadata.EntryPoint:
    """Return the one entry point of a name.

    Raises:
        BackendError: There are several, and which one is meant is not ours to choose.
    """
    if len(points) > 1:
        owners = ", ".join(_distribution(point) for point in points)
        raise BackendError(
            f"several distributions ship a backend for {points[0].name!r}: {owners}; uninstall "
            "all but one"
        )
    return points[0]


def _distribution(point: metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"


def _hint(name: str) -> str:
    return f"; in a clone of dlo: {install_command(_extra(name))}" if name in _OURS else ""


def _extra(name: str) -> str:
    return {"cuda": "cuda", "npu": "ascend"}.get(name, "")
