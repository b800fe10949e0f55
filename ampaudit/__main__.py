"""Run ``ampaudit`` as ``python -m ampaudit``."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose files must not take the place of modules

from ampaudit.cli.main import run

if __name__ == "__main__":
    run()
