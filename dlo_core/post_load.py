"""Post-load functions: they make what no checkpoint has, non-persistent buffers above all.

They run while the plan is made, on the model's own modules, whose buffers are stand-ins meanwhile;
then everything that they changed is taken back, and their values wait for the commit with all
others. So a load that fails leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.layout import span_nbytes
from dlo_core.rawbytes import bytes_of

__all__ = ["Made", "PostLoad", "make_values", "meta_attributes"]

PostLoad = Mapping[str, Callable[[Any], object]] | Callable[[Any], object] | None

_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(slots=True, eq=False)
class Made:
    """What the functions made.

    Attributes:
        values: By the id of the model's tensor that they are for.
        attributes: (module, name, value) of plain attributes, to be set at the commit.
    """

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    attributes: list[tuple[nn.Module, str, object]] = field(default_factory=list)

    def attach(self) -> None:
        """Set the plain attributes."""
        for module, name, value in self.attributes:
            module.__dict__[name] = value


def make_values(model: nn.Module, post_load: PostLoad, stored: Collection[str]) -> Made:
    """Run the functions and return what they made; the model is as it was.

    A function is given a module and sets its buffers, by assignment or in place; parameters that
    the checkpoint lacks and plain attributes may be set, too. Parameters have no values yet where
    they are on meta.

    Args:
        model: The model.
        post_load: One function for the whole model, or functions by the dotted names of modules.
        stored: Names of tensors that come from the checkpoint.

    Raises:
        ConfigError: There is no such module, a function raised, or it made another shape or dtype
            than the model's, or a tensor that the model did not have.
        CheckpointError: Neither the checkpoint nor a function makes a tensor that is a plain
            attribute of a module.
    """
    made = Made()
    functions = _functions(model, post_load)
    if functions:
        keeper = _Keeper(model, stored)
        try:
            with torch.inference_mode(False), torch.no_grad():
                keeper.put_stand_ins()
                for path, module, function in functions:
                    _call(path, module, function)
                keeper.collect(made)
        finally:
            keeper.restore()
    return made


def meta_attributes(model: nn.Module, made: Made) -> None:
    """Refuse a model whose modules keep tensors on meta as plain attributes.

    Raises:
        CheckpointError: Names one and ``post_load=``.
    """
    replaced = {(id(module), name) for module, name, _ in made.attributes}
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _TABLES or (id(module), name) in replaced:
                continue
            if any(tensor.is_meta and id(tensor) not in known for tensor in _tensors_in(value)):
                where = f"{path}.{name}" if path else name
                raise CheckpointError(
                    f"{where!r} is a tensor on meta that is neither parameter nor buffer, so no "
                    "checkpoint has it: pass post_load= with a function that makes it, or build "
                    "the model with it real"
                )


def _functions(
    model: nn.Module, post_load: PostLoad
) -> list[tuple[str, nn.Module, Callable[[Any], object]]]:
    if post_load is None:
        return []
    if callable(post_load):
        return [("", model, post_load)]
    if not isinstance(post_load, Mapping):
        raise ConfigError(
            "post_load= must be a function of the model, or a mapping from dotted names of its "
            f"modules to functions of them; got {type(post_load).__name__}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    rows = []
    for path, function in post_load.items():
        if path not in modules:
            raise ConfigError(f"post_load= has {path!r}, but the model has no module of that name")
        if not callable(function):
            raise ConfigError(f"post_load= of {path!r} must be a function; got {function!r}")
        rows.append((path, modules[path], function))
    return rows


def _call(path: str, module: nn.Module, function: Callable[[Any], object]) -> None:
    where = f"post_load= of {path!r}" if path else "post_load="
    try:
        function(module)
    except Exception as error:
        raise ConfigError(f"{where} raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Was:
    """One module as it was."""

    path: str
    module: nn.Module
    attributes: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    hidden: set[str]


class _Keeper:
    """Remembers a model's tables and attributes, and puts them back."""

    def __init__(self, model: nn.Module, stored: Collection[str]) -> None:
        self._stored = stored
        self._was = [
            _Was(
                path,
                module,
                {key: value for key, value in vars(module).items() if key not in _TABLES},
                {name: dict(getattr(module, name)) for name in _TABLES},
                set(module._non_persistent_buffers_set),
            )
            for path, module in model.named_modules()
        ]
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}

    def put_stand_ins(self) -> None:
        """Put real memory in the place of buffers that the checkpoint lacks.

        So that a function may write in place, and what is written to is told by its version.
        """
        for was in self._was:
            for key, buffer in was.tables["_buffers"].items():
                if buffer is None or _name(was.path, key) in self._stored:
                    continue
                if id(buffer) not in self._stand_ins:
                    blank = torch.empty_strided(
                        buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cpu"
                    )
                    if not buffer.is_meta:
                        blank.copy_(buffer)
                    self._stand_ins[id(buffer)] = blank
                    self._versions[id(buffer)] = blank._version
                was.module._buffers[key] = self._stand_ins[id(buffer)]

    def collect(self, made: Made) -> None:
        """Add what changed to ``made``."""
        for was in self._was:
            self._collect_attributes(was, made)
            for table in ("_parameters", "_buffers"):
                now = getattr(was.module, table)
                for key, value in now.items():
                    self._collect_tensor(was, table, key, value, made)

    def _collect_attributes(self, was: _Was, made: Made) -> None:
        if was.module._modules != was.tables["_modules"]:
            raise ConfigError(f"post_load= changed the submodules of {was.path or 'the model'!r}")
        for key, value in vars(was.module).items():
            if key in _TABLES or key == "_non_persistent_buffers_set":
                continue
            if was.attributes.get(key) is not value:
                made.attributes.append((was.module, key, value))

    def _collect_tensor(self, was: _Was, table: str, key: str, value: Any, made: Made) -> None:
        name, before = _name(was.path, key), was.tables[table].get(key)
        if value is before:
            return
        if before is None or not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"post_load= put {type(value).__name__} at {name!r}, where the model had "
                f"{type(before).__name__}; it may only give values to tensors that are there"
            )
        if value is self._stand_ins.get(id(before)):
            same = before.is_meta or torch.equal(_bytes(value), _bytes(before))
            if value._version == self._versions[id(before)] and same:
                return  # nobody wrote to it
        elif name in self._stored and table == "_buffers":
            raise CheckpointError(f"{name!r} is in the checkpoint, and post_load= made it too")
        if tuple(value.shape) != tuple(before.shape) or value.dtype != before.dtype:
            raise ConfigError(
                f"post_load= made {name!r} as {value.dtype} of shape {tuple(value.shape)}; the "
                f"model wants {before.dtype} of shape {tuple(before.shape)}"
            )
        if value.is_meta:
            return
        made.values.setdefault(id(before), _laid_like(value, before))

    def restore(self) -> None:
        """Put everything back as it was."""
        for was in self._was:
            module = was.module
            for key in [key for key in vars(module) if key not in (*_TABLES, *was.attributes)]:
                del module.__dict__[key]
            for key, value in was.attributes.items():
                module.__dict__[key] = value
            for name, entries in was.tables.items():
                table = getattr(module, name)
                table.clear()
                table.update(entries)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(was.hidden)


def _laid_like(value: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the values on the host with the strides of the model's tensor."""
    made = torch.empty_strided(before.shape, before.stride(), dtype=before.dtype, device="cpu")
    made.copy_(value.detach())
    return made


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return bytes_of(tensor, span_nbytes(tensor.shape, tensor.stride(), tensor.element_size()))


def _name(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _tensors_in(value: Any, depth: int = 2) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if not depth:
        return []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return [tensor for item in value for tensor in _tensors_in(item, depth - 1)]
    return []
