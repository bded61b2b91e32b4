"""What every test gets: the testing kit's plug-in, as a backend's author has it."""

from __future__ import annotations

pytest_plugins = ["dlo_core.testing.pytest_plugin"]
