"""The files of a checkpoint: which of them belong to the path that the user gave.

Where the Hugging Face loaders would pick one of several candidates in silence (transformers and
diffusers do not pick the same), this refuses and names them.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from dlo_core.errors import CheckpointError
from dlo_core.safetensors_header import SafetensorsFile, read_header, refuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["candidates", "find_files"]

_SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# model.safetensors.index.json; a variant stands before the last part, as diffusers writes it.
_INDEX = re.compile(r"(?P<base>.+)\.safetensors\.index(\.[^.]+)?\.json")
_NUMBERED = re.compile(r"(?P<before>.+)-(?P<number>\d+)-of-(?P<count>\d+)(?P<after>.*)")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONVERT = "convert it to safetensors first (safetensors.torch.save_file)"


def find_files(path: Path) -> list[SafetensorsFile]:
    """Return the files of the checkpoint at ``path``; only headers are read.

    An index decides which files are read and which of them must have which key. Keys that it does
    not name but that lie in its files are part of the checkpoint, as for the Hugging Face loaders.

    Args:
        path: A ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either.

    Raises:
        CheckpointError: Something is missing, damaged or ambiguous; names the file and the key.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        hint = ""
        if _HUB_ID.fullmatch(str(path)):
            hint = "; a Hugging Face name must be downloaded first (huggingface_hub)"
        raise CheckpointError(f"there is no checkpoint at {str(path)!r} ({error}){hint}") from error
    # A later chdir must not matter.
    path = path.absolute()
    if stat.S_ISDIR(mode):
        return _in_folder(path)
    if path.suffix == ".json":
        return _by_index(path)
    if path.suffix in _PICKLES:
        refuse(path, f"is a pickle by its name; {_CONVERT}")
    return [read_header(path)]


def candidates(path: Path) -> list[Path]:
    """Return the files that a checkpoint at ``path`` may consist of, there or not, unchecked."""
    if path.is_dir():
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        indexes = [entry for entry in entries if _INDEX.fullmatch(entry.name)]
        found = [entry for entry in entries if entry.name.endswith(_SUFFIX)]
        return found if len(indexes) != 1 else _named(indexes[0]) or found
    return _named(path) if path.suffix == ".json" else [path]


def _named(index: Path) -> list[Path]:
    try:
        return [index.parent / name for name in dict.fromkeys(_weight_map(index).values())]
    except CheckpointError:
        return []


def _in_folder(folder: Path) -> list[SafetensorsFile]:
    try:
        # Names with a dot first are leavings of editors, downloads and file systems.
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"cannot list {str(folder)!r}: {error.strerror or error}") from error
    files = [entry for entry in entries if entry.name.endswith(_SUFFIX)]
    indexes = [entry for entry in entries if _INDEX.fullmatch(entry.name)]
    if len(indexes) > 1:
        _refuse_several(folder, indexes)
    if indexes:
        return _by_index(indexes[0], files)
    if not files:
        refuse(folder, f"has no {_SUFFIX} file and no index{_hint(entries)}")
    _check_numbers(folder, files)
    return [read_header(file) for file in files]


def _by_index(index: Path, beside: Sequence[Path] = ()) -> list[SafetensorsFile]:
    """Return the files that an index names; ``beside``: all safetensors files of its folder."""
    weight_map = _weight_map(index)
    keys: dict[str, list[str]] = {}
    for key, name in weight_map.items():
        keys.setdefault(name, []).append(key)
    match = _INDEX.fullmatch(index.name)
    base = match["base"].split(".")[0] if match else ""
    rivals = [p for p in beside if p.name.split(".")[0] == base and p.name not in keys]
    if rivals:
        _refuse_several(index.parent, [index, *rivals])
    files = []
    for name, wanted in keys.items():
        path = index.parent / name
        if not os.path.exists(path):
            refuse(index, f"wants the file {name!r} ({_counted(wanted)}): not there; download it")
        file = read_header(path)
        lacking = [key for key in wanted if key not in file.tensors]
        if lacking:
            refuse(index, f"says that {name!r} has {_counted(lacking)}: it has not; download both")
        files.append(file)
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Return file names by key, all of them inside the index's folder."""
    try:
        content: Any = json.loads(index.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {str(index)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(index)!r} is not JSON ({error}); download it again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        refuse(index, "has no weight_map; wanted the index of a safetensors checkpoint")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name:
            refuse(index, f"gives {name!r:.80} as its file; wanted a file name", key)
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or "\0" in name:
            refuse(index, f"gives the file {name!r:.80}, which is outside of the folder", key)
        if not name.endswith(_SUFFIX):
            refuse(index, f"gives the file {name!r:.80}, which is no {_SUFFIX}; {_CONVERT}", key)
    return weight_map


def _check_numbers(folder: Path, files: Iterable[Path]) -> None:
    """Refuse a set of numbered files with a gap: without an index nothing else would notice."""
    there: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        if match := _NUMBERED.fullmatch(file.name):
            group = (match["before"], match["count"], match["after"])
            there.setdefault(group, set()).add(int(match["number"]))
    for (before, count, after), numbers in there.items():
        for number in range(1, int(count) + 1):
            if number not in numbers:
                name = f"{before}-{number:0{len(count)}}-of-{count}{after}"
                refuse(folder, f"lacks {name!r}, one of {int(count)} files; download it")


def _refuse_several(folder: Path, candidates: Iterable[Path]) -> None:
    names = ", ".join(repr(path.name) for path in candidates)
    refuse(folder, f"has more than one checkpoint ({names}); give the path of the one you mean")


def _hint(entries: Iterable[Path]) -> str:
    """Return what to do about a folder that holds no checkpoint."""
    for entry in entries:
        if entry.suffix in _PICKLES:
            return f"; {entry.name!r} is a pickle: {_CONVERT}"
    components = [e.name for e in entries if e.is_dir() and any(e.glob(f"*{_SUFFIX}"))]
    if len(components) == 1:
        return f"; its folder {components[0]!r} has one: give that path"
    if components:
        # What is offloaded goes first.
        components.sort(key=lambda name: not name.startswith("transformer"))
        names = ", ".join(map(repr, components))
        return (
            f"; it holds the components of a pipeline ({names}): give the path of the one that "
            "belongs to the model, several models take a sequence of paths"
        )
    return ""


def _counted(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{keys[0]!r}{more}"
