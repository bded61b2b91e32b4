"""Build the stand-in for CANN with the system's C++ compiler: ``python build.py FOLDER``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME = ("control.cpp", "devices.cpp", "memory.cpp", "streams.cpp")
# torch_npu is linked against these too. What it looks up in them with dlsym is found in what they
# depend on.
EMPTY = ("acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
FLAGS = "-O1 -g -fPIC -shared -fvisibility=hidden -Wall -Wextra -Wno-unused-parameter"


def commands(folder: Path, torch_folder: Path) -> list[list[str]]:
    """Return the compiler's command lines, in order.

    Args:
        folder: Where the libraries go.
        torch_folder: The package torch, whose headers and kernels the operators use.
    """
    compiler = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS.split()]
    against = [f"-L{folder}", "-lascendcl"]

    def library(name: str, *rest: str) -> list[str]:
        made = f"lib{name}.so"
        return [*compiler, f"-Wl,-soname,{made}", "-o", str(folder / made), *rest]

    def sources(*names: str) -> list[str]:
        return [str(HERE / name) for name in names]

    torch_flags = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    return [
        library("ascendcl", "-std=c++17", *sources(*RUNTIME), "-lpthread"),
        *(library(name, "-x", "c++", os.devnull, "-Wl,--no-as-needed", *against) for name in EMPTY),
        library("hccl", "-std=c++17", *sources("hccl.cpp"), *against, "-lpthread", "-lrt"),
        library(
            "opapi",
            "-std=c++20",
            *torch_flags,
            *sources("operators.cpp"),
            *against,
            "-ltorch_cpu",
            "-lc10",
        ),
    ]


def stamp(torch_folder: Path) -> str:
    """Return a text that changes when the sources or torch do."""
    files = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__)])
    return "\n".join([str(torch_folder), *(file.read_text(encoding="utf-8") for file in files)])


def build(folder: Path) -> Path:
    """Build what is not built yet and return ``folder``.

    Raises:
        subprocess.CalledProcessError: The compiler failed; it has said why.
    """
    # Not imported: with torch_npu there and no CANN, `import torch` fails.
    import importlib.util

    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the operators need torch's headers; install torch first")
    torch_folder = Path(found.submodule_search_locations[0])
    marker = folder / "stamp"
    if not marker.exists() or marker.read_text(encoding="utf-8") != stamp(torch_folder):
        folder.mkdir(parents=True, exist_ok=True)
        for command in commands(folder, torch_folder):
            subprocess.run(command, check=True)
        marker.write_text(stamp(torch_folder), encoding="utf-8")
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python build.py FOLDER")
    print(build(Path(sys.argv[1]).resolve()))
