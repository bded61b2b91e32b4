"""The install command, in one constant: the name ``dlo`` on the public index is not ours."""

from __future__ import annotations

__all__ = ["INSTALL", "install_command"]

INSTALL = 'pip install ".{extra}"'


def install_command(extra: str = "") -> str:
    """Return the command that installs dlo, with ``extra`` or without any, in a clone of it."""
    return INSTALL.format(extra=f"[{extra}]" if extra else "")
