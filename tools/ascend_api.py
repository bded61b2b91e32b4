"""Check, without installing or importing it, that a torch-npu wheel has what dlo_ascend uses.

usage: ascend_api.py FOLDER [VERSION...]   download those versions into FOLDER and check them
       ascend_api.py WHEEL...              check these

The Python sources in the wheel are read with ast: names, and the parameters that dlo passes. What
comes from its C extension (the methods of _NPUStreamBase and the like) is seen only at run time, by
the tests on the stand-in for CANN.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

# The release that the extra asks for, and those around it.
VERSIONS = (
    "2.9.0.post9",
    "2.10.0.post7",
    "2.11.0.post3",
    "2.12.0.post3",
    "2.13.0",
    "2.14.0",
)
# File in the wheel -> name -> the parameters that dlo passes.
REQUIRED: dict[str, dict[str, tuple[str, ...]]] = {
    "torch_npu/npu/utils.py": {
        "synchronize": ("device",),
        "current_device": (),
        "get_cann_version": ("module",),
        "device.__init__": ("device",),
        "device.__enter__": (),
        "device.__exit__": (),
    },
    "torch_npu/npu/__init__.py": {
        "device_count": (),
        "is_initialized": (),
        "mem_get_info": ("device",),
        "npurt": (),
    },
    "torch_npu/npu/memory.py": {
        "memory_allocated": ("device",),
        "memory_reserved": ("device",),
        "host_empty_cache": (),
        "host_memory_stats": (),
    },
    "torch_npu/npu/streams.py": {
        "Stream.__new__": ("device", "priority"),
        "Stream.wait_event": ("event",),
        "Stream.record_event": ("event",),
        "Stream.synchronize": (),
        "Event.__new__": ("enable_timing",),
        "Event.record": ("stream",),
        "Event.query": (),
        "Event.synchronize": (),
        "Event.elapsed_time": ("end_event",),
    },
    "torch_npu/npu/_format.py": {"Format": ()},
}


def functions(tree: ast.Module) -> dict[str, tuple[set[str], bool]]:
    """Return the parameters of every function and class, and whether it takes any keyword."""
    found: dict[str, tuple[set[str], bool]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                args = node.args
                names = {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
                found[prefix + node.name] = (names, args.kwarg is not None)
            elif isinstance(node, ast.ClassDef):
                found[prefix + node.name] = (set(), True)
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try):
                visit(node.body, prefix)
                visit(node.orelse, prefix)

    visit(tree.body, "")
    return found


def problems(wheel: Path) -> list[str]:
    """Return what the wheel lacks."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for file, wanted in REQUIRED.items():
            try:
                have = functions(ast.parse(archive.read(file).decode()))
            except KeyError:
                found.append(f"there is no {file}")
                continue
            for name, parameters in wanted.items():
                if name not in have:
                    found.append(f"{file} has no {name}")
                    continue
                names, any_keyword = have[name]
                missing = [p for p in parameters if p not in names and not any_keyword]
                found += [f"{file}: {name} takes no {parameter!r}" for parameter in missing]
    return found


def download(folder: Path, versions: list[str]) -> list[Path]:
    """Return the wheels of ``versions``, downloaded without their requirements."""
    folder.mkdir(parents=True, exist_ok=True)
    for version in versions:
        if not list(folder.glob(f"torch_npu-{version}-*.whl")):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary", ":all:", "--python-version", "311"]
            command += ["--platform", "manylinux_2_28_x86_64", "--dest", str(folder)]
            subprocess.run([*command, f"torch-npu=={version}"], check=True)
    return [next(folder.glob(f"torch_npu-{version}-*.whl")) for version in versions]


def main(arguments: list[str]) -> int:
    """Check and return the exit status."""
    if not arguments:
        raise SystemExit(__doc__)
    if arguments[0].endswith(".whl"):
        wheels = [Path(argument) for argument in arguments]
    else:
        wheels = download(Path(arguments[0]), arguments[1:] or list(VERSIONS))
    names = sum(map(len, REQUIRED.values()))
    wrong = 0
    for wheel in wheels:
        found = problems(wheel)
        wrong += bool(found)
        print(f"{wheel.name}: {names} names, {len(found)} problems", *found, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
