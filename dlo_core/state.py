"""The state: the named tensors of one offloaded model, and its ``state_dict()``.

Names are those that the model has now, so what was wrapped or added after ``offload()`` is there
under its present name. Values are copies on the host, never aliases: host memory of the weights
ends with the offload, and nobody could order a write into it against the copies to the device.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from dlo_core.binding import Placeholder
from dlo_core.dtensor import is_part, local_of
from dlo_core.errors import UseError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from dlo_core.readback import ReadBack

    Place = tuple[int, int]

__all__ = ["ModelState", "Named", "on_host"]


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """One tensor of a state dict.

    Attributes:
        name: Its key.
        first: The first key of the same tensor; another one where it is tied.
        tensor: What hangs there now: a placeholder, or a tensor that stays on the device.
        place: Block and number in the block's layout, of a tensor that streams; else None.
    """

    name: str
    first: str
    tensor: torch.Tensor
    place: Place | None


class ModelState:
    """Knows which places of a model stand for which tensors of which blocks."""

    def __init__(
        self, model: nn.Module, placeholders: Mapping[Place, Placeholder], readback: ReadBack
    ) -> None:
        """Take what was planned; the model is not touched.

        Args:
            model: The model.
            placeholders: Of its streamed tensors, by block and number in the block's layout.
            readback: Reads the values of its blocks.
        """
        self.model = model
        self.readback = readback
        self._places = {id(standin): place for place, standin in placeholders.items()}
        self._values: Mapping[Place, torch.Tensor] = {}
        self._copies: dict[object, torch.Tensor] | None = None

    @property
    def gathers(self) -> bool:
        """Whether the values are spread over the ranks."""
        return self.readback.gathers

    def named(self) -> list[Named]:
        """Return the tensors that ``state_dict()`` has, by their present names, in its order."""
        found: list[Named] = []
        first: dict[object, str] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            hidden = module._non_persistent_buffers_set
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or (key in hidden and key in module._buffers):
                    continue
                place = self._place_of(tensor)
                name = f"{path}.{key}" if path else key
                same = first.setdefault(_alias(tensor) if place is None else place, name)
                found.append(Named(name, same, tensor, place))
        return found

    def check_no_parts(self, what: str, module: nn.Module | None = None) -> None:
        """Refuse a model, or a module of it, of whose tensors this rank has but a part.

        Raises:
            UseError: Names the first one and the remedy.
        """
        for name, tensor in _all_tensors(self.model if module is None else module):
            managed = not isinstance(tensor, Placeholder) and isinstance(
                local_of(tensor), Placeholder
            )
            if managed or is_part(tensor):
                raise UseError(
                    f"{what} cannot be done: {name!r} is a DTensor of which each rank has a part "
                    "(tensor parallelism, or fully_shard), and dlo would take the part for the "
                    "whole; disable() first and use torch.distributed.checkpoint or "
                    "full_tensor(), or go by the checkpoint that the weights came from"
                )

    def tensors(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield all names and values: what stays on the device, then the blocks as they run.

        Tied names give one and the same tensor. Never more than a block is held. See
        ``ReadBack.blocks`` for what the ranks must do.

        Raises:
            UseError: A value cannot be had now.
            FillError: A block could not be gathered; the offload is closed.
        """
        named = self.named()
        streamed: dict[int, list[tuple[str, int]]] = {}
        for one in named:
            if one.place is not None:
                streamed.setdefault(one.place[0], []).append((one.name, one.place[1]))
        begun = False
        try:
            yield from _residents(named)
            begun = True
            with closing(self.readback.blocks()) as blocks:
                for number, values in blocks:
                    for name, index in streamed.get(number, ()):
                        yield name, values[index]
        finally:
            # Ended among the residents: the other ranks want their turn of the tape all the same.
            if not begun:
                self.serve()

    def serve(self) -> None:
        """Make the fills that another rank reads, and take nothing."""
        for _ in self.readback.blocks(receive=False):
            raise AssertionError("a rank that only serves received a block")

    def collect(self) -> dict[str, Any]:
        """Return the whole ``state_dict()``, read block by block; all ranks alike."""
        if not self.gathers:
            return self.model.state_dict()
        values: dict[Place, torch.Tensor] = {}
        with closing(self.readback.blocks()) as blocks:
            for number, tensors in blocks:
                values |= {(number, index): tensor for index, tensor in enumerate(tensors)}
        self._values = values
        try:
            return self.model.state_dict()
        finally:
            self._values = {}

    def show(
        self, module: nn.Module, inner: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Answer ``state_dict()`` of the model or a block: on the host, and nothing an alias."""
        nested = self._copies is not None
        if not nested:
            self.check_no_parts("state_dict()", module)
        with self.shared(type(module).__name__):
            live = {_storage(one.tensor) for one in self.named() if one.place is None} - {None}
            out = inner(*args, **kwargs)
            if nested or kwargs.get("keep_vars", args[2] if len(args) > 2 else False):
                return out
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            hosts: dict[object, torch.Tensor] = {}
            for key, value in out.items():
                if key.startswith(prefix) and _is_device_memory(value, live):
                    alias = _alias(value)
                    if alias not in hosts:
                        hosts[alias] = on_host(value)
                    out[key] = hosts[alias]
            return out

    @contextmanager
    def shared(self, what: str) -> Iterator[None]:
        """Let the calls inside give one copy for all names of a tensor.

        Raises:
            UseError: The values are spread over the ranks, or a block computes now.
        """
        with self.readback.entered():
            if self.gathers and not self._values:
                _refuse(what)
            outer, self._copies = self._copies, {} if self._copies is None else self._copies
            try:
                yield
            finally:
                self._copies = outer
                if outer is None:
                    self.readback.rest()

    def save_module(
        self, module: nn.Module, inner: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> None:
        """Answer ``_save_to_state_dict`` of one module with values in place of placeholders."""
        swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        if self._copies is None:
            self.check_no_parts("state_dict()", module)
        with self.shared(type(module).__name__):
            try:
                tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for table in tables:
                    for key, present in table.items():
                        if self._place_of(present) is not None:
                            value = self._value(present)
                            swapped.append((table, key, present))
                            table[key] = value
                inner(*args, **kwargs)
            finally:
                for table, key, standin in swapped:
                    table[key] = standin

    def _place_of(self, tensor: object) -> Place | None:
        return self._places.get(id(tensor)) if isinstance(tensor, Placeholder) else None

    def _value(self, standin: torch.Tensor) -> torch.Tensor:
        place = self._places[id(standin)]
        copies = self._copies
        assert copies is not None
        if place not in copies:
            with torch.inference_mode(False), torch.no_grad():
                value = self._values.get(place)
                if value is None:
                    value = self.readback.tensor(*place)
                if isinstance(standin, nn.Parameter):
                    value = nn.Parameter(value, standin.requires_grad)
            copies[place] = value
        return copies[place]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, with the same strides unless its elements overlap.

    Of a DTensor, which must be whole on every rank, a plain tensor.
    """
    with torch.inference_mode(False), torch.no_grad():
        source = local_of(tensor).detach()
        shape, stride = source.shape, source.stride()
        if source.layout != torch.strided or any(
            step == 0 and length > 1 for length, step in zip(shape, stride, strict=True)
        ):
            return source.to("cpu", copy=True)
        made = torch.empty_strided(shape, stride, dtype=source.dtype, device="cpu")
        return made.copy_(source)


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules():
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                yield f"{path}.{key}" if path else key, tensor


def _residents(named: Sequence[Named]) -> Iterator[tuple[str, torch.Tensor]]:
    names = Counter(one.first for one in named)
    tied: dict[str, torch.Tensor] = {}
    for one in named:
        if one.place is not None:
            continue
        if one.tensor.is_meta:
            raise UseError(
                f"{one.name!r} is on the meta device and has no values to be saved; give it some"
            )
        value = tied.get(one.first)
        if value is None:
            value = on_host(one.tensor)
            if names[one.first] > 1:
                tied[one.first] = value
        yield one.name, value


def _alias(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors that are the same bytes seen the same way."""
    where = _storage(tensor)
    if where is None or not tensor.numel():
        return id(tensor)
    return (where, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _storage(tensor: object) -> tuple[torch.device, int] | None:
    """Return what tells a tensor's memory from others'; None where there is none to tell."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, Placeholder):
        return None
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return None
    try:
        return tensor.device, tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return None


def _is_device_memory(value: object, live: set[tuple[torch.device, int] | None]) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    return value.device.type != "cpu" or _storage(value) in live


def _refuse(what: str) -> NoReturn:
    raise UseError(
        f"state_dict() of an offloaded {what}: its values are spread over the ranks, each of which "
        "holds a part; call LayerwiseOffload.state_dict() (or save(), or named_tensors()) on every "
        "rank, or disable() first"
    )
