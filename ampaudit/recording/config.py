"""Options of ``record``."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge
from pydantic import AfterValidator

from ampaudit.core.config import Config, Option
from ampaudit.core.text import parse_size


def _bytes(size: int | str) -> int:
    return parse_size(size) if isinstance(size, str) else size


class RecordConfig(Config):
    """Options of ``record``."""

    every: Annotated[int, Ge(1), Option("Record the first call and every N-th after it.", metavar="N")] = 1
    first: Annotated[int, Ge(1), Option("Maximum number of recorded calls per module.", metavar="N")] = 1000
    max_bytes: Annotated[
        int | str,
        AfterValidator(_bytes),
        Option("Maximum size of the files.", metavar="SIZE"),
    ] = "4GB"
    force: Annotated[bool, Option("Replace an earlier recording.", command_line=False)] = False

    @property
    def limit(self) -> int:
        """``max_bytes`` as a number of bytes."""
        return _bytes(self.max_bytes)
