"""Hooks: wrapping the calls of a model and its blocks from the outermost place, and undoing it.

The wrapper is the instance's ``_compiled_call_impl``, which ``nn.Module`` asks first: so class,
``forward`` and
signature stay as they are, ``compile()`` of a block ends up inside of the wrapper in either order,
and step caches that replace ``forward`` do too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from dlo_core.compiling import OUTSIDE
from dlo_core.errors import UseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.streamer import Streamer

__all__ = ["Hooks", "offload_of"]

_ENGINE = "_dlo_offload"


class _Engine:
    """What the model keeps of its offload; neither copied nor pickled."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UseError("an offloaded model cannot be copied; disable() first")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UseError("an offloaded model cannot be pickled; disable() first")


def offload_of(model: nn.Module) -> Any:
    """Return the offload that the model keeps, or None."""
    engine = vars(model).get(_ENGINE) if isinstance(model, nn.Module) else None
    return None if engine is None else engine.owner


class _Wrapped:
    """One module whose call goes through dlo."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.was_compiled = module._compiled_call_impl is not None
        self.inner: Callable[..., Any] = module._compiled_call_impl or module._call_impl
        self._handles: list[Any] = []
        self._before = {key: vars(module)[key] for key in self._keys if key in vars(module)}

    _keys = ("_compiled_call_impl", "compile", "_apply", "__call__")

    def attach(self, call: Callable[..., Any]) -> None:
        attributes = vars(self.module)
        attributes["_compiled_call_impl"] = call
        attributes["compile"] = self.compile
        attributes["_apply"] = self.refuse_apply
        # See [Note: outside of the graph] in compiling.py.
        attributes["__call__"] = _asking(self.module)
        self._handles = [
            self.module.register_load_state_dict_pre_hook(_refuse_load),
            self.module.register_state_dict_pre_hook(_refuse_state_dict),
        ]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's own call, inside of the wrapper."""
        self.was_compiled = True
        self.inner = torch.compile(self.module._call_impl, *args, **kwargs)

    def refuse_apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UseError(
            f"{type(self.module).__name__} is offloaded, so it cannot be moved or converted "
            "(.to(), .half(), "
            ".cuda(), .cpu()): its blocks already compute on the offload's device; disable() "
            "first, or "
            "move the other parts of the pipeline one by one"
        )

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        attributes = vars(self.module)
        for key in self._keys:
            attributes.pop(key, None)
        attributes.update(self._before)
        if self.was_compiled:
            attributes["_compiled_call_impl"] = self.inner


class Hooks:
    """All wrappers of one model."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], streamer: Streamer) -> None:
        """Prepare the wrappers; nothing is touched."""
        self._model = model
        self._root = _Wrapped(model)
        self._blocks = [_Wrapped(block) for block in blocks]
        self._streamer = streamer

    def attach(self, owner: Any) -> None:
        """Wrap the model and its blocks; ``owner`` lives as long as the model."""
        vars(self._model)[_ENGINE] = _Engine(owner)
        self._root.attach(_root_call(self._root, self._streamer))
        for number, block in enumerate(self._blocks):
            block.attach(_block_call(block, self._streamer, number))

    def detach(self) -> None:
        """Undo ``attach``."""
        for wrapped in (*self._blocks, self._root):
            wrapped.detach()
        vars(self._model).pop(_ENGINE, None)


def _asking(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return type(module).__call__(module, *args, **kwargs)

    return call


def _root_call(wrapped: _Wrapped, streamer: Streamer) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            torch._dynamo.skip_frame(msg=OUTSIDE)
        return streamer.call_root(wrapped.inner, args, kwargs)

    return call


def _block_call(wrapped: _Wrapped, streamer: Streamer, block: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            torch._dynamo.skip_frame(msg=OUTSIDE)
        return streamer.call(block, wrapped.inner, args, kwargs)

    return call


def _refuse_load(module: nn.Module, *args: Any) -> NoReturn:
    raise UseError(
        f"load_state_dict() on an offloaded {type(module).__name__} would lose the values of its "
        "streamed "
        "blocks; disable(), load, and offload again"
    )


def _refuse_state_dict(module: nn.Module, *args: Any) -> NoReturn:
    raise UseError(
        f"state_dict() of an offloaded {type(module).__name__} is not whole: the streamed blocks "
        "wait in host "
        "memory; disable() first, or read the checkpoint"
    )
