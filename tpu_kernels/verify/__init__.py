"""Does a kernel compile, and does it compute what it should?"""

from __future__ import annotations
