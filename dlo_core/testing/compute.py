"""Compute: the model's own torch operations, as work of the simulated device.

The recorder is told what they read and write; where the host runs ahead they are queued.

An operation that is queued gives its results at once, with the right form and NaN in them; the
values come when the device gets there. What cannot be known before, such as ``item()`` or
``torch.equal``, makes the host wait, as on a device; ``tolist()`` and ``numpy()``, which go past
torch's dispatcher, do not.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dlo_core.layout import span_nbytes
from dlo_core.testing.device_memory import storage_of
from dlo_core.testing.streams import ComputeStream

if TYPE_CHECKING:
    from dlo_core.testing.backend import SimBackend

__all__ = ["Compute"]

# The form of the result, or the state of the generator, follows from the values.
_NEEDS_VALUES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


class Compute(TorchDispatchMode):
    """Sees every torch operation of the thread that entered it."""

    def __init__(self, backend: SimBackend) -> None:
        """Queue on the current stream of ``backend``, and tell its recorder."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend = backend

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: else the first operation of a process imports torch's compiler, for seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take the operation apart, as far as torch does, and tell, run or queue it."""
        kwargs = kwargs or {}
        if self._backend.world.executing:
            return func(*args, **kwargs)
        # Some of these say that they give a view, and copy all the same (reshape, contiguous).
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if _only_views(func):
            return func(*args, **kwargs)
        reads, writes = _touched(func, args, kwargs)
        stream = self._backend.current_stream()
        if self._backend.recorder is not None:
            self._backend.recorder.accesses(stream.name, "compute", reads=reads, writes=writes)
        if isinstance(stream, ComputeStream) or not self._is_device_work(reads, writes):
            return func(*args, **kwargs)
        return self._queue(func, args, kwargs, (*reads, *writes))

    def _is_device_work(self, *groups: tuple[torch.Tensor, ...]) -> bool:
        """Return whether a tensor is on the device, or its values are not there yet."""
        backend = self._backend
        if backend.graph is not None:
            return True
        storages = {storage_of(tensor) for tensors in groups for tensor in tensors}
        return any(backend.device_memory.holds(s) or backend.world.pending(s) for s in storages)

    def _queue(
        self, func: Any, args: Any, kwargs: dict[str, Any], touched: tuple[torch.Tensor, ...]
    ) -> Any:
        given = _written(func, args, kwargs)
        results = given if func._schema.is_mutable else _forms(func, args, kwargs)
        if results is None:
            self._backend.current_stream().synchronize()
            return func(*args, **kwargs)
        kept_args, kept_kwargs = tree_map(self._alias, (args, kwargs))
        # Made in this mode of inference; only in this one may they be written.
        inference = torch.is_inference_mode_enabled()

        def work() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                values = func(*kept_args, **kept_kwargs)
                if not func._schema.is_mutable:
                    for out, value in zip(_tensors(results), _tensors(values), strict=True):
                        out.copy_(value)

        storages = frozenset(map(storage_of, (*touched, *_tensors(results))))
        self._backend.current_stream().run(work, storages)
        return results

    def _alias(self, value: Any) -> Any:
        return self._backend.device_memory.alias(value) if _has_storage(value) else value


def _touched(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return the tensors that the operation reads, and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for argument, value in _arguments(func, args, kwargs):
        into = writes if _is_written(argument) else reads
        into += [leaf for leaf in tree_leaves(value) if _has_storage(leaf)]
    return tuple(reads), tuple(writes)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    declared = func._schema.arguments
    named = {argument.name: argument for argument in declared}
    pairs = list(zip(declared, args, strict=False))
    return pairs + [(named[name], value) for name, value in kwargs.items()]


def _is_written(thing: Any) -> bool:
    return thing.alias_info is not None and thing.alias_info.is_write


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation returns that writes into its arguments; None if it is not these."""
    returns = func._schema.returns
    given = [value for argument, value in _arguments(func, args, kwargs) if _is_written(argument)]
    if not all(map(_is_written, returns)) or len(given) < len(returns):
        return None
    return given[0] if len(returns) == 1 else tuple(given[: len(returns)])


def _forms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return results without their values; None where these cannot be known before."""
    if _NEEDS_VALUES & set(func.tags):
        return None
    try:
        # Not on meta tensors: there many operations import torch's compiler, for seconds.
        forms = func(*tree_map(_zeros_like, args), **tree_map(_zeros_like, kwargs))
    # Whatever torch has to say: it needs the values.
    except Exception:
        return None
    leaves = tree_leaves(forms)
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    return tree_map(_without_values, forms)


def _zeros_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = tuple(value.shape), tuple(value.stride())
    count = span_nbytes(shape, stride, value.element_size()) // value.element_size()
    return torch.zeros(count, dtype=value.dtype, device="cpu").as_strided(shape, stride)


def _without_values(form: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device="cpu")
    return made.fill_(torch.nan) if made.is_floating_point() else made


@cache
def _is_composite(func: Any) -> bool:
    """Return whether torch makes the operation of others."""
    key: Any = torch._C.DispatchKey.CompositeImplicitAutograd
    kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    return kernel or key in func.py_kernels


@cache
def _only_views(func: Any) -> bool:
    """Return whether the operation only makes another view and touches no byte."""
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _has_storage(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta
