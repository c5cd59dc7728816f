"""Where operators run: CPU, the simulated ``"tpu"`` device, the real one."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_ready = False


def ready() -> None:
    """Give kernels their backends: CPU at once, the simulated device wherever it may be installed.

    Called on the first use of the package's API (importing the package alone changes nothing).
    Where the simulated device cannot or must not be installed (real TorchTPU, another platform,
    ``TPU_KERNELS_SIM_DEVICE=0``), kernels run on CPU tensors, and
    `tpu_kernels.backends.device.why_not` says why.
    """
    global _ready
    if _ready:
        return
    with _lock:
        if _ready:
            return
        from tpu_kernels import versions

        versions.check(*versions.BASE)
        from tpu_kernels.backends import cpu, device, helion_gpu
        from tpu_kernels.backends.device import backend as device_backend
        from tpu_kernels.backends.torch_tpu import detection
        from tpu_kernels.registry import cache_tag

        cache_tag.install()
        cpu.register()
        helion_gpu.register()
        if detection.owns_device():
            from tpu_kernels.backends.torch_tpu import backend as torch_tpu_backend

            torch_tpu_backend.register()
        else:
            device.when_installed(device_backend.register)
            device.auto_install()
        _ready = True
