"""``python -m tpu_kernels``, the same as the console script ``tpu-kernels``."""

from __future__ import annotations

import sys

from tpu_kernels.cli.main import main

sys.exit(main())
