"""The inspection of a checkpoint: what it holds and what dlo would do with it; headers alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dlo_core.checkpoint import Checkpoint, CheckpointTensor
from dlo_core.checkpoint_files import candidates
from dlo_core.config import OffloadConfig
from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.inspection_report import (
    FileReport,
    Inspection,
    LayoutReport,
    RankReport,
    StackReport,
)
from dlo_core.layout import BlockLayout, TensorSpec, contiguous_stride
from dlo_core.plan import Loading, plan_model
from dlo_core.safetensors_header import read_header
from dlo_core.shard import ShardPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

__all__ = ["inspect_checkpoint"]

# That of most backends; a few more bytes a tensor on others.
_ALIGNMENT = 256
# A list of layers is a stack of blocks from this share of all bytes on, as in discovery.py.
_SHARE = 0.01
_ODD = {torch.float64: "twice the bytes of float32", torch.complex64: "complex numbers"}


def inspect_checkpoint(
    path: Path,
    *,
    ranks: Sequence[int] = (1, 2, 4, 8),
    blocks: Sequence[str] = (),
    model: str | None = None,
) -> Inspection:
    """Return what the checkpoint at ``path`` holds; damage is reported and not raised.

    Args:
        path: A safetensors file, a folder with one or several, or an index.
        ranks: Sizes of groups.
        blocks: Names of containers of blocks; none: found by the names of the tensors, or by the
            model.
        model: Name of a class in diffusers, built without values from the ``config.json`` beside
            the checkpoint; the plan is then the real one.

    Raises:
        ConfigError: A size is not positive, or the model cannot be built.
    """
    if any(size < 1 for size in ranks):
        raise ConfigError(f"ranks must be positive; got {list(ranks)}")
    built = None if model is None else _build(model, path)
    files, problems = _read(path)
    tensors = {name: tensor for _, found in files.values() for name, tensor in found.items()}
    notes = _odd_dtypes(tensors.values())
    if built is not None and not problems:
        layouts, outside = _plan(built, path, blocks, problems, notes)
    else:
        layouts, outside = _by_names(tensors, blocks, problems, notes)
    return Inspection(
        path=str(path),
        model=model,
        files=tuple(
            FileReport(file.name, size, len(found)) for file, (size, found) in files.items()
        ),
        num_tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        dtypes=_dtypes((t.dtype, t.nbytes) for t in tensors.values()),
        stacks=_stacks(layouts),
        outside_tensors=len(outside.tensors),
        outside_nbytes=sum(spec.nbytes for spec in outside.tensors),
        ranks=tuple(_rank_report(layouts, size) for size in ranks) if layouts else (),
        unread=tuple(_unread(path, files)),
        notes=tuple(notes),
        problems=tuple(problems),
    )


_Files = dict[Path, tuple[int, "dict[str, CheckpointTensor]"]]


def _read(path: Path) -> tuple[_Files, list[str]]:
    """Return the tensors by file and all problems; one bad file does not hide the others."""
    try:
        opened = Checkpoint.open(path)
    except CheckpointError as error:
        return _read_damaged(path, str(error))
    files: _Files = {}
    for tensor in opened.tensors.values():
        size = 0 if tensor.path in files else tensor.path.stat().st_size
        files.setdefault(tensor.path, (size, {}))[1][tensor.name] = tensor
    return files, []


def _read_damaged(path: Path, first: str) -> tuple[_Files, list[str]]:
    problems, files = [first], _Files()
    seen: dict[str, str] = {}
    for file in candidates(path) if path.exists() else []:
        try:
            header = read_header(file.absolute())
        except CheckpointError as error:
            if str(error) not in problems:
                problems.append(str(error))
            continue
        files[header.path] = (header.nbytes, header.tensors)
        for name in header.tensors:
            if name in seen and not any(repr(name) in problem for problem in problems):
                problems.append(f"{name!r} is both in {seen[name]!r} and in {file.name!r}")
            seen.setdefault(name, file.name)
    return files, problems


def _unread(path: Path, files: Mapping[Path, object]) -> list[str]:
    if not path.is_dir():
        return []
    used = {file.name for file in files}
    kinds = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
    return sorted(e.name for e in path.iterdir() if e.suffix in kinds and e.name not in used)


def _odd_dtypes(tensors: Iterable[CheckpointTensor]) -> list[str]:
    notes = []
    counts = Counter(tensor.dtype for tensor in tensors)
    for dtype, why in _ODD.items():
        if counts[dtype]:
            notes.append(f"{counts[dtype]} tensors are {_short(dtype)}: {why}")
    low = sum(n for dtype, n in counts.items() if dtype.is_floating_point and dtype.itemsize == 1)
    if low:
        notes.append(
            f"{low} tensors are 8-bit floats: the model must have parameters of that dtype, or "
            "transforms= must cast them"
        )
    return notes


# --- blocks by the names of the tensors -----------------------------------------------------------


def _by_names(
    tensors: Mapping[str, CheckpointTensor],
    wanted: Sequence[str],
    problems: list[str],
    notes: list[str],
) -> tuple[list[BlockLayout], BlockLayout]:
    found = _containers(tensors, wanted)
    if wanted:
        problems += [f"no tensor lies in a block of {name!r}" for name in wanted if not found[name]]
    else:
        least = _SHARE * sum(tensor.nbytes for tensor in tensors.values())
        found = {n: b for n, b in found.items() if _is_stack(b.values(), tensors, least)}
        if tensors and not found:
            notes.append("no blocks were found by the names of the tensors; name them: --blocks")
    layouts, inside = [], set()
    for name, members in found.items():
        numbers = [int(n) for n in members if n.isdigit()]
        gaps = sorted(set(range(max(numbers, default=0))) - set(numbers))
        if gaps:
            notes.append(f"{name!r} has no block {', '.join(map(str, gaps[:5]))}")
        for number, keys in members.items():
            inside.update(keys)
            specs = [_spec(tensors[key]) for key in keys]
            layouts.append(BlockLayout.pack(f"{name}.{number}", specs, _ALIGNMENT))
    rest = [_spec(tensor) for name, tensor in tensors.items() if name not in inside]
    return layouts, BlockLayout.pack("", rest, _ALIGNMENT)


def _containers(tensors: Iterable[str], wanted: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return names of tensors by container and number, in the order of the numbers."""
    found: dict[str, dict[str, list[str]]] = {name: {} for name in wanted}
    for key in tensors:
        name, number = _place(key, wanted)
        if name is not None:
            found.setdefault(name, {}).setdefault(number, []).append(key)
    return {
        name: dict(sorted(members.items(), key=lambda row: (len(row[0]), row[0])))
        for name, members in found.items()
    }


def _place(key: str, wanted: Sequence[str]) -> tuple[str | None, str]:
    if wanted:
        for name in wanted:
            if key.startswith(name + "."):
                return name, key[len(name) + 1 :].split(".", maxsplit=1)[0]
        return None, ""
    parts = key.split(".")
    for index in range(1, len(parts) - 1):
        if parts[index].isdigit():
            return ".".join(parts[:index]), parts[index]
    return None, ""


def _is_stack(
    members: Iterable[Sequence[str]], tensors: Mapping[str, CheckpointTensor], least: float
) -> bool:
    forms = Counter(
        tuple(sorted((key.split(".")[-1], tensors[key].shape) for key in keys)) for keys in members
    )
    nbytes = sum(tensors[key].nbytes for keys in members for key in keys)
    return bool(forms) and max(forms.values()) >= 2 and nbytes >= least


def _spec(tensor: CheckpointTensor) -> TensorSpec:
    return TensorSpec(tensor.name, tensor.dtype, tensor.shape, contiguous_stride(tensor.shape))


# --- blocks by a model ----------------------------------------------------------------------------


def _build(name: str, path: Path) -> nn.Module:
    """Return the model without values."""
    try:
        import diffusers
    except ImportError as error:
        raise ConfigError("--model needs diffusers: install dlo[diffusers]") from error
    kind = getattr(diffusers, name, None)
    if kind is None or not hasattr(kind, "from_config"):
        raise ConfigError(f"diffusers has no model {name!r}")
    config = (path if path.is_dir() else path.parent) / "config.json"
    try:
        values = json.loads(config.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model needs {str(config)!r}: {error}") from error
    try:
        with torch.device("meta"):
            model: nn.Module = kind.from_config(values)
    except Exception as error:
        raise ConfigError(f"{name} cannot be built from {str(config)!r}: {error}") from error
    return model


def _plan(
    model: nn.Module, path: Path, blocks: Sequence[str], problems: list[str], notes: list[str]
) -> tuple[list[BlockLayout], BlockLayout]:
    """Return the layouts of the real plan."""
    made: list[str] = []

    def blank(module: nn.Module) -> None:
        made.extend(_blank(module))

    try:
        plan = plan_model(
            model,
            OffloadConfig(packed=False),
            blocks=tuple(blocks) or None,
            loading=Loading(path, post_load=blank),
            size=1,
            alignment=_ALIGNMENT,
            device_type="cpu",
        )
    except (ConfigError, CheckpointError) as error:
        problems.append(str(error))
        return [], BlockLayout.pack("", (), _ALIGNMENT)
    if plan.checkpoint is not None:
        plan.checkpoint.close()
    if made:
        notes.append(
            f"{made[0]!r}{f' and {len(made) - 1} more' if len(made) > 1 else ''} are in no "
            "checkpoint: build the model with its buffers real, or pass post_load="
        )
    return list(plan.layouts), plan.remainder


def _blank(model: nn.Module) -> list[str]:
    """Give zeros to what no checkpoint has; return its names."""
    names = []
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key in module._non_persistent_buffers_set:
                buffer.zero_()
                names.append(f"{path}.{key}" if path else key)
        for key, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(module, key, torch.zeros_like(value, device="cpu"))
                names.append(f"{path}.{key}" if path else key)
    return names


# --- numbers --------------------------------------------------------------------------------------


def _stacks(layouts: Sequence[BlockLayout]) -> tuple[StackReport, ...]:
    by_name: dict[str, list[BlockLayout]] = {}
    for layout in layouts:
        by_name.setdefault(layout.name.rpartition(".")[0], []).append(layout)
    reports = []
    for name, members in by_name.items():
        kinds: dict[object, list[BlockLayout]] = {}
        for layout in members:
            start = len(layout.name) + 1
            form = tuple((t.name[start:], t.dtype, t.shape) for t in layout.tensors)
            kinds.setdefault(tuple(sorted(form, key=str)), []).append(layout)
        reports.append(
            StackReport(
                name,
                len(members),
                sum(spec.nbytes for layout in members for spec in layout.tensors),
                tuple(
                    LayoutReport(
                        tuple(layout.name.rpartition(".")[2] for layout in same),
                        len(same[0].tensors),
                        same[0].nbytes,
                        _dtypes((spec.dtype, spec.nbytes) for spec in same[0].tensors),
                    )
                    for same in kinds.values()
                ),
            )
        )
    return tuple(reports)


def _rank_report(layouts: Sequence[BlockLayout], size: int) -> RankReport:
    shards = [ShardPlan.cut(layout.nbytes, size, _ALIGNMENT) for layout in layouts]
    return RankReport(
        size,
        sum(shard.nbytes for shard in shards),
        min(2, len(shards)) * max(shard.padded_nbytes for shard in shards),
        2 * max(shard.nbytes for shard in shards) if size > 1 else 0,
    )


def _dtypes(rows: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for dtype, nbytes in rows:
        totals[_short(dtype)] += nbytes
    return dict(totals.most_common())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
