"""Run ``ampaudit`` as ``python -m ampaudit``."""

from __future__ import annotations

from ampaudit.cli.main import run

if __name__ == "__main__":
    run()
