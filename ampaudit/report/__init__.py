"""Documents: the results of every command, as frozen values."""

from __future__ import annotations
