"""``python -m tools.replay record FOLDER``, then ``python -m tools.replay compare FOLDER``."""

from __future__ import annotations

import sys

from tools.replay.main import main

if __name__ == "__main__":
    sys.exit(main())
