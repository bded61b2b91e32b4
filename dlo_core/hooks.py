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
    from collections.abc import Callable, Iterable

    from dlo_core.state import ModelState
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


class _Attributes:
    """Attributes of one module that are put over its class's, and what hung there before."""

    def __init__(self, module: nn.Module, keys: Iterable[str]) -> None:
        self.module = module
        self._keys = tuple(keys)
        self._before = {key: vars(module)[key] for key in self._keys if key in vars(module)}

    def put(self, **values: Any) -> None:
        vars(self.module).update(values)

    def take_away(self) -> None:
        attributes = vars(self.module)
        for key in self._keys:
            attributes.pop(key, None)
        attributes.update(self._before)

    def own(self, key: str) -> Callable[..., Any]:
        """Return the module's own method, as it was before."""
        method: Callable[..., Any] = self._before.get(key) or getattr(self.module, key)
        return method


class _Wrapped:
    """One module whose call goes through dlo."""

    def __init__(self, module: nn.Module, state: ModelState) -> None:
        self.module = module
        self.was_compiled = module._compiled_call_impl is not None
        self.inner: Callable[..., Any] = module._compiled_call_impl or module._call_impl
        self._attributes = _Attributes(
            module,
            (
                *("_compiled_call_impl", "compile", "_apply", "__call__"),
                *("state_dict", "load_state_dict"),
            ),
        )
        self._state = state
        self._save = self._attributes.own("state_dict")
        self._handle: Any = None

    def attach(self, call: Callable[..., Any], load: Callable[..., Any]) -> None:
        self._attributes.put(
            _compiled_call_impl=call,
            compile=self.compile,
            _apply=self.refuse_apply,
            state_dict=self.state_dict,
            load_state_dict=load,
            # See [Note: outside of the graph] in compiling.py.
            __call__=_asking(self.module),
        )
        self._handle = self.module.register_load_state_dict_pre_hook(_refuse_load)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's own call, inside of the wrapper."""
        self.was_compiled = True
        self.inner = torch.compile(self.module._call_impl, *args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._state.show(self.module, self._save, args, kwargs)

    def refuse_load(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_load(self.module)

    def refuse_apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UseError(
            f"{type(self.module).__name__} is offloaded, so it cannot be moved or converted "
            "(.to(), .half(), "
            ".cpu()): its blocks already compute on the offload's device; disable() "
            "first, or "
            "move the other parts of the pipeline one by one"
        )

    def detach(self) -> None:
        self._handle.remove()
        self._attributes.take_away()
        if self.was_compiled:
            vars(self.module)["_compiled_call_impl"] = self.inner


class _Saved:
    """One module that owns streamed tensors, whose share of a state dict comes from dlo."""

    def __init__(self, module: nn.Module, state: ModelState) -> None:
        self._attributes = _Attributes(module, ("_save_to_state_dict",))
        self._inner = self._attributes.own("_save_to_state_dict")
        self._state = state

    def attach(self) -> None:
        self._attributes.put(_save_to_state_dict=self.save)

    def save(self, *args: Any, **kwargs: Any) -> None:
        self._state.save_module(self._attributes.module, self._inner, args, kwargs)

    def detach(self) -> None:
        self._attributes.take_away()


class Hooks:
    """All wrappers of one model."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        owners: Iterable[nn.Module],
        *,
        streamer: Streamer,
        state: ModelState,
    ) -> None:
        """Prepare the wrappers; nothing is touched.

        Args:
            model: The model.
            blocks: Its blocks.
            owners: The modules in whose tables streamed tensors hang.
            streamer: Runs the calls.
            state: Answers ``state_dict()``.
        """
        self._model = model
        self._root = _Wrapped(model, state)
        self._blocks = [_Wrapped(block, state) for block in blocks]
        self._saved = [_Saved(module, state) for module in dict.fromkeys(owners)]
        self._streamer = streamer

    def attach(self, owner: Any) -> None:
        """Wrap the model and its blocks; ``owner`` lives as long as the model."""
        vars(self._model)[_ENGINE] = _Engine(owner)
        for saved in self._saved:
            saved.attach()
        self._root.attach(_root_call(self._root, self._streamer), _load(owner, self._model))
        for number, block in enumerate(self._blocks):
            block.attach(_block_call(block, self._streamer, number), block.refuse_load)

    def detach(self) -> None:
        """Undo ``attach``."""
        for saved in self._saved:
            saved.detach()
        for wrapped in (*self._blocks, self._root):
            wrapped.detach()
        vars(self._model).pop(_ENGINE, None)


def _asking(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return type(module).__call__(module, *args, **kwargs)

    return call


def _load(owner: Any, model: nn.Module) -> Callable[..., Any]:
    def load_state_dict(state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return owner.load_state_dict(state_dict, model=model, strict=strict, assign=assign)

    return load_state_dict


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
        f"load_state_dict() on a part or a parent of an offloaded model ({type(module).__name__}): "
        "it would lose the values of streamed blocks; call load_state_dict() of the offloaded "
        "model itself or LayerwiseOffload.update_weights(), or disable(), load, and offload again"
    )
