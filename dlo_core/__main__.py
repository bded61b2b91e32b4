"""``python -m dlo_core`` is the command ``dlo``."""

from dlo_core.cli import main

if __name__ == "__main__":
    main()
