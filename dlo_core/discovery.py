"""Discovery: which modules of a model are its blocks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from dlo_core.errors import ConfigError
from dlo_core.fsdp import is_managed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["LEAST_SHARE", "FoundBlock", "find_blocks"]

LEAST_SHARE = 0.01
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_CLASS_NAMES = ("_repeated_blocks", "_no_split_modules")
_SHOWN = 10
_REMEDY = (
    "name the containers of its blocks in run order, blocks=('name', ...), or pass a function from "
    "the model to its blocks"
)


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
    children: tuple[tuple[str, nn.Module], ...]
    share: float
    rejected: str | None

    def __str__(self) -> str:
        kinds = " or ".join(dict.fromkeys(type(child).__name__ for _, child in self.children))
        return (
            f"{self.name!r}: {len(self.children)} x {kinds or 'nothing'}, {self.share:.1%} of the "
            f"parameters; {self.rejected}"
        )


def find_blocks(
    model: nn.Module,
    blocks: Sequence[str] | Callable[[nn.Module], Iterable[nn.Module]] | None = None,
) -> tuple[FoundBlock, ...]:
    """Return the blocks of ``model`` in the order in which they are declared or registered.

    Taken in this order: ``blocks``; the class attribute ``dlo_blocks``; the outermost modules in
    containers whose classes diffusers declares (``_repeated_blocks``, else ``_no_split_modules``);
    the outermost containers of at least two children of one class that hold at least 1 % of the
    parameters. Children without tensors (``nn.Identity``) are no blocks. A module that a container
    holds twice is one block that runs twice.

    Args:
        model: The root module, with values or on meta.
        blocks: Dotted names of containers (``ModuleList``, ``ModuleDict``, ``Sequential``, or a
            property that gives one), or a function from the model to its blocks.

    Raises:
        ConfigError: Nothing was found (it lists what was looked at), a name means nothing, a module
            cannot be a block, or blocks lie inside each other.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"offload() needs a torch.nn.Module; got {_described(model)}")
    if blocks is not None:
        found = _declared(model, blocks, "blocks=")
    elif (own := _own_declaration(model)) is not None:
        found = _declared(model, own, f"{type(model).__name__}.dlo_blocks")
    else:
        found = _by_class_names(model) or _by_rule(model)
    found = [block for block in found if _has_tensors(block.module)]
    if not found:
        raise ConfigError(
            f"the blocks of {type(model).__name__} hold no tensors to stream; {_REMEDY}"
        )
    _check_apart(found)
    return tuple(found)


# --- declared by name or function -------------------------------------------------------------


def _own_declaration(model: nn.Module) -> Any:
    declared = getattr(model, "dlo_blocks", None)
    # A plain function in a class body is a method by now; it wants the model once.
    return declared.__func__ if inspect.ismethod(declared) else declared


def _declared(model: nn.Module, declared: Any, origin: str) -> list[FoundBlock]:
    if isinstance(declared, str):
        declared = (declared,)
    if callable(declared) and not isinstance(declared, nn.Module):
        given = declared(model)
        modules = _items(given)
        if modules is None:
            raise ConfigError(
                f"the function in {origin} must return an iterable of modules; it returned "
                f"{_described(given)}"
            )
    else:
        names = _items(declared)
        if names is None or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"{origin} wants dotted names of containers, or a function from the model to its "
                f"blocks; got {_described(declared)}"
            )
        modules = [child for name in names for child in _children_of(model, name, origin)]
    if not modules:
        raise ConfigError(f"{origin} gives no block of {type(model).__name__}; {_REMEDY}")
    registered = {id(module): name for name, module in model.named_modules()}
    for module in modules:
        _check_block(model, module, registered, origin)
    return [FoundBlock(registered[id(module)], module) for module in modules]


def _items(value: Any) -> list[Any] | None:
    """Return what a container or any other iterable holds; None: it is none."""
    if isinstance(value, nn.Module):
        # Each child once, though a container may hold it twice.
        return list(value.children()) if isinstance(value, _CONTAINERS) else None
    return list(value) if isinstance(value, Iterable) else None


def _children_of(model: nn.Module, name: str, origin: str) -> list[nn.Module]:
    owner = _resolve(model, name)
    if owner is None:
        raise ConfigError(
            f"{origin} names {name!r}, but {type(model).__name__} has no such container; "
            f"{_near(model, name)}"
        )
    if not isinstance(owner, (*_CONTAINERS, list, tuple)):
        raise ConfigError(
            f"{origin} names {name!r}, which is {_described(owner)}; wanted a container of blocks "
            f"(ModuleList, ModuleDict, Sequential); {_near(model, name)}"
        )
    children = _items(owner)
    if not children:
        raise ConfigError(f"{origin} names {name!r}, which is empty and has no blocks")
    return children


def _resolve(model: nn.Module, name: str) -> Any:
    """Follow a dotted name through registered modules, and else through attributes."""
    owner: Any = model
    for part in name.split("."):
        registered = owner._modules.get(part) if isinstance(owner, nn.Module) else None
        if registered is not None:
            owner = registered
        elif isinstance(owner, list | tuple) and part.isdecimal():
            owner = dict(enumerate(owner)).get(int(part))
        else:
            owner = getattr(owner, part, None)
    return owner


def _near(model: nn.Module, name: str) -> str:
    known = [other for other, _ in _containers(model) if other]
    same_end = [
        other for other in known if other.split(".")[-1] == name.rsplit(".", maxsplit=1)[-1]
    ]
    near = [*same_end, *difflib.get_close_matches(name, known, 3, 0.4), *known]
    shown = list(dict.fromkeys(near))[:3]
    return f"perhaps {' or '.join(map(repr, shown))}?" if shown else "it has no containers"


def _check_block(model: nn.Module, module: Any, registered: dict[int, str], origin: str) -> None:
    name = registered.get(id(module))
    if name is None:
        raise ConfigError(
            f"{origin} gives {_described(module)} as a block; wanted a registered submodule of "
            f"{type(model).__name__}"
        )
    if not name:
        raise ConfigError(f"{origin} gives the model itself as a block; wanted modules inside it")
    if not _is_called(module):
        raise ConfigError(
            f"{origin} gives {name!r} as a block, but {_described(module)} has no forward and is "
            "never called: it holds modules and is no block; go one level deeper"
        )


# --- found by class or rule -------------------------------------------------------------------


def _by_class_names(model: nn.Module) -> list[FoundBlock]:
    """Return the outermost modules in containers whose classes diffusers declares as repeated."""
    for attribute in _CLASS_NAMES:
        classes = frozenset(getattr(model, attribute, None) or ())
        found: dict[int, FoundBlock] = {}
        names: set[str] = set()
        for name, container in _containers(model):
            if _is_below_any(name, names):
                continue
            for key, child in container.named_children():
                if (
                    _kind(child).__name__ in classes
                    and _is_called(child)
                    and id(child) not in found
                ):
                    found[id(child)] = FoundBlock(_join(name, key), child)
                    names.add(_join(name, key))
        if found:
            return list(found.values())
    return []


def _by_rule(model: nn.Module) -> list[FoundBlock]:
    total = _num_elements(model)
    found: dict[int, FoundBlock] = {}
    names: set[str] = set()
    looked_at: list[_Candidate] = []
    for name, container in _containers(model):
        if _is_below_any(name, names):
            continue
        children = tuple(container.named_children())
        share = _num_elements(container) / max(total, 1)
        rejected = _why_not([child for _, child in children], share)
        looked_at.append(_Candidate(name, children, share, rejected))
        if rejected is None:
            names.update(_join(name, key) for key, _ in children)
            for key, child in children:
                found.setdefault(id(child), FoundBlock(_join(name, key), child))
    if not found:
        raise ConfigError(_nothing_found(model, looked_at))
    return list(found.values())


def _kind(module: nn.Module) -> type:
    """Return the class of a module, before parametrize or ``fully_shard`` made one from it."""
    kind = type(module)
    if is_managed(module):
        kind = kind.__bases__[-1]
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def _why_not(children: Sequence[nn.Module], share: float) -> str | None:
    if len(children) < 2:
        return "fewer than two children"
    if len({_kind(child) for child in children}) > 1:
        return "children of several classes"
    if not _is_called(children[0]):
        return "its children have no forward, they are containers themselves"
    if not all(any(True for _ in child.parameters()) for child in children):
        return "a child has no parameters"
    if share < LEAST_SHARE:
        return f"less than {LEAST_SHARE:.0%}"
    return None


def _nothing_found(model: nn.Module, looked_at: Sequence[_Candidate]) -> str:
    lines = [
        f"{attribute} = {list(classes)!r}: no container holds one"
        for attribute in _CLASS_NAMES
        if (classes := getattr(model, attribute, None))
    ]
    ranked = sorted(looked_at, key=lambda candidate: -candidate.share)
    lines += [str(candidate) for candidate in ranked[:_SHOWN]]
    if len(ranked) > _SHOWN:
        lines.append(f"and {len(ranked) - _SHOWN} smaller ones")
    if not looked_at:
        lines.append("no ModuleList, ModuleDict or Sequential in it")
    text = "".join(f"\n  {line}" for line in lines)
    return f"no blocks were found in {type(model).__name__}. Looked at:{text}\nTo go on, {_REMEDY}"


# --- facts about modules ----------------------------------------------------------------------


def _containers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all containers, the outer ones first."""
    for name, module in model.named_modules():
        if isinstance(module, _CONTAINERS):
            yield name, module


def _is_called(module: nn.Module) -> bool:
    """Return whether it has a forward of its own: containers have none, but Sequential has."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _num_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not is_lazy(p))


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_below_any(name: str, names: set[str]) -> bool:
    while name:
        if name in names:
            return True
        name = name.rpartition(".")[0]
    return False


def _described(value: Any) -> str:
    """Return its class; for no module also the modules in it, as a pipeline has them."""
    kind = f"a {type(value).__name__}"
    attributes = {} if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
    inside = [name for name, item in attributes.items() if isinstance(item, nn.Module)]
    return f"{kind}, which has the modules {', '.join(inside)}" if inside else kind


def _check_apart(blocks: Sequence[FoundBlock]) -> None:
    names: dict[int, str] = {}
    for block in blocks:
        if id(block.module) in names:
            raise ConfigError(f"block {block.name!r} is given twice; name each container once")
        names[id(block.module)] = block.name
    for block in blocks:
        for path, module in block.module.named_modules():
            if path and id(module) in names:
                raise ConfigError(
                    f"block {names[id(module)]!r} lies inside block {block.name!r}; blocks must "
                    f"not overlap: {_REMEDY}"
                )
