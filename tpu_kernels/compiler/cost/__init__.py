"""How long a kernel takes on a TPU, told from its generated code."""

from __future__ import annotations
