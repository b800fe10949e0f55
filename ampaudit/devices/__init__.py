"""A catalogue of accelerators, a description of this machine, and cost estimates for ops."""

from __future__ import annotations
