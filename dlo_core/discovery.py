"""Discovery: which modules of a model are its blocks."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from dlo_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["LEAST_SHARE", "FoundBlock", "find_blocks"]

LEAST_SHARE = 0.01
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """One block.

    Attributes:
        name: Dotted name in the model.
        module: The module.
    """

    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A container that was looked at, and why it was not taken (None: it was)."""

    name: str
    container: nn.Module
    share: float
    rejected: str | None

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(m).__name__ for m in self.container.children()))
        count = len(list(self.container.children()))
        text = f"{self.name!r}: {count} x {kinds or 'nothing'}, {self.share:.1%} of the parameters"
        return f"{text} ({self.rejected})" if self.rejected else text


def find_blocks(
    model: nn.Module,
    blocks: Sequence[str] | Callable[[nn.Module], Iterable[nn.Module]] | None = None,
) -> tuple[FoundBlock, ...]:
    """Return the blocks of ``model`` in the order in which they are declared or registered.

    Taken in this order: ``blocks``; the class attribute ``dlo_blocks``; diffusers'
    ``_repeated_blocks`` and
    ``_no_split_modules``; the outermost containers of one repeated class that hold at least 1 % of
    the parameters. Children without tensors are left out.

    Args:
        model: The root module, with values or on meta.
        blocks: Dotted names of containers (``ModuleList``, ``ModuleDict``, ``Sequential``, or a
            property
            that gives one), or a function from the model to its blocks.

    Raises:
        ConfigError: Nothing was found (it lists what was looked at), a name means nothing, or
            blocks lie
            inside each other.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"offload() needs a torch.nn.Module; got {type(model).__name__}")
    names = {id(module): name for name, module in model.named_modules()}
    declared: Any = blocks if blocks is not None else getattr(model, "dlo_blocks", None)
    if declared is not None:
        found = _declared(model, declared, names)
    else:
        found = _by_class_names(model) or _by_rule(model)
    with_tensors = [block for block in found if _has_tensors(block.module)]
    if not with_tensors:
        raise ConfigError(f"the blocks of {type(model).__name__} hold no tensors to stream")
    _check_apart(with_tensors)
    return tuple(with_tensors)


def _declared(model: nn.Module, declared: Any, names: dict[int, str]) -> list[FoundBlock]:
    if callable(declared):
        modules = list(declared(model))
    else:
        if isinstance(declared, str):
            declared = (declared,)
        modules = [child for name in declared for child in _children_of(model, name)]
    if not modules:
        raise ConfigError(f"blocks= gave no block of {type(model).__name__}")
    for module in modules:
        if id(module) not in names:
            raise ConfigError(
                f"blocks= gave a {type(module).__name__} that is not a registered submodule of "
                f"{type(model).__name__}"
            )
    return [FoundBlock(names[id(module)], module) for module in modules]


def _children_of(model: nn.Module, name: str) -> list[nn.Module]:
    owner: Any = model
    for part in name.split("."):
        owner = owner[int(part)] if _is_index(owner, part) else getattr(owner, part, None)
        if owner is None:
            known = [n for n, m in model.named_modules() if isinstance(m, _CONTAINERS)]
            close = difflib.get_close_matches(name, known, 3, 0.4) or known[:5]
            raise ConfigError(
                f"{type(model).__name__} has no {name!r}; containers it has: "
                f"{', '.join(map(repr, close)) or 'none'}"
            )
    children = owner.values() if isinstance(owner, nn.ModuleDict) else owner
    if not isinstance(owner, (*_CONTAINERS, list, tuple)):
        raise ConfigError(
            f"{name!r} is a {type(owner).__name__}; blocks= wants the name of a container of "
            "blocks "
            "(ModuleList, ModuleDict, Sequential)"
        )
    found = list(children)
    if not found:
        raise ConfigError(f"{name!r} is an empty {type(owner).__name__}; it has no blocks")
    return found


def _is_index(owner: Any, part: str) -> bool:
    return isinstance(owner, nn.ModuleList | nn.Sequential | list | tuple) and part.isdecimal()


def _by_class_names(model: nn.Module) -> list[FoundBlock]:
    """Return the outermost modules in containers whose classes diffusers declares as repeated."""
    for attribute in ("_repeated_blocks", "_no_split_modules"):
        classes = getattr(model, attribute, None)
        if not classes:
            continue
        found: list[FoundBlock] = []
        for name, container in _outermost_first(model, _CONTAINERS):
            for key, child in container.named_children():
                path = f"{name}.{key}"
                if type(child).__name__ in classes and not _inside(path, found):
                    found.append(FoundBlock(path, child))
        if found:
            return found
    return []


def _by_rule(model: nn.Module) -> list[FoundBlock]:
    total = sum(p.numel() for p in model.parameters())
    found: list[FoundBlock] = []
    looked_at: list[_Candidate] = []
    for name, container in _outermost_first(model, _CONTAINERS):
        if _inside(name, found):
            continue
        children = list(container.named_children())
        share = sum(p.numel() for p in container.parameters()) / total if total else 0.0
        rejected = _why_not([child for _, child in children], share)
        looked_at.append(_Candidate(name, container, share, rejected))
        if rejected is None:
            found += [FoundBlock(f"{name}.{key}", child) for key, child in children]
    if not found:
        seen = "; ".join(map(str, looked_at)) or "it has no ModuleList, ModuleDict or Sequential"
        raise ConfigError(
            f"no blocks were found in {type(model).__name__}. Looked at: {seen}. Name the "
            "containers of its "
            "blocks with blocks=('name', ...), or a function from the model to its blocks"
        )
    return found


def _why_not(children: Sequence[nn.Module], share: float) -> str | None:
    kinds = {type(child) for child in children}
    if len(children) < 2:
        return "fewer than 2 children"
    if len(kinds) > 1:
        return "children of several classes"
    child = children[0]
    if isinstance(child, _CONTAINERS) or type(child).forward is nn.Module.forward:
        return "children are containers"
    if not all(_has_tensors(child) for child in children):
        return "children without parameters"
    if share < LEAST_SHARE:
        return f"below {LEAST_SHARE:.0%}"
    return None


def _outermost_first(
    model: nn.Module, kinds: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name and isinstance(module, kinds):
            yield name, module


def _inside(name: str, blocks: Iterable[FoundBlock]) -> bool:
    return any(name == block.name or name.startswith(block.name + ".") for block in blocks)


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _check_apart(blocks: Sequence[FoundBlock]) -> None:
    seen: dict[int, str] = {}
    for block in blocks:
        if id(block.module) in seen:
            raise ConfigError(
                f"block {block.name!r} is given twice (also as {seen[id(block.module)]!r})"
            )
        seen[id(block.module)] = block.name
    for block in blocks:
        for name, module in block.module.named_modules():
            if name and id(module) in seen:
                raise ConfigError(
                    f"block {seen[id(module)]!r} lies inside block {block.name!r}; name one of them"
                )
