"""Delete dlo_cuda and dlo_ascend from this environment, then show that dlo still explains itself.

Run it with the interpreter of an environment that has the wheel: ``dlo info`` must list both entry
points, whose packages are gone, with the reason.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

GONE = {"cuda": "dlo_cuda", "npu": "dlo_ascend"}


def delete_vendor_packages() -> None:
    """Delete the vendors' packages from this environment's site-packages, nowhere else."""
    site_packages = Path(sysconfig.get_path("purelib"))
    if sys.prefix == sys.base_prefix:
        sys.exit("core_only.py deletes packages: run it with a virtual environment's Python")
    for package in GONE.values():
        shutil.rmtree(site_packages / package, ignore_errors=True)
        if importlib.util.find_spec(package) is not None:
            sys.exit(f"{package} can still be imported after it was deleted from {site_packages}")


def dlo(*arguments: str) -> str:
    """Run the installed command and return what it printed."""
    command = str(Path(sysconfig.get_path("scripts")) / "dlo")
    done = subprocess.run(
        [command, *arguments],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    if done.returncode != 0:
        sys.exit(f"dlo {' '.join(arguments)} ended with status {done.returncode}\n{done.stdout}")
    return done.stdout


def main() -> None:
    """Delete, ask, and fail unless the answer names each absent backend and its package."""
    delete_vendor_packages()
    table = dlo("info")
    print(table)
    record = json.dumps(json.loads(dlo("info", "--json")))
    for shown in (table, record):
        for device, package in GONE.items():
            if device not in shown or package not in shown:
                sys.exit(
                    f"dlo info does not give {device!r} with the reason that {package} is gone"
                )
    print("dlo info lists cuda and npu with the reason why each is absent")


if __name__ == "__main__":
    main()
