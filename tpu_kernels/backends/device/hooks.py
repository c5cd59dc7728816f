"""What torch asks of a backend in C++ and Python cannot answer: generators and pinned memory.

torch lets Python override three of the virtual functions of a backend's hooks. The others raise;
here the hooks object gets a copy of its virtual table in which they answer with the CPU's generator
and allocator. Which entry is which follows from torch's public headers
(``ATen/detail/AcceleratorHooksInterface.h``) and is verified twice: by the object's class name, and
by comparing its table with that of its base class, which may differ in known entries only.
"""

from __future__ import annotations

import ctypes

import torch

from tpu_kernels.backends.device import native
from tpu_kernels.backends.device.probe import peek_pointer, rehearse
from tpu_kernels.errors import DeviceError

# Order of declaration: two destructors, then isBuilt, isAvailable, hasPrimaryContext, init, ...
# What torch's class for Python backends overrides (11 to 15: pinned memory, pointers, generators).
_OVERRIDDEN = frozenset({0, 1, 2, 3, 4, 11, 12, 13, 14, 15})
_KNOWN_CLASS = "N5torch3acc11PythonHooksE"
_ANSWERED_BY_PYTHON = (2, 3, 4)
_PINNED_MEMORY_ALLOCATOR = 12
_DEFAULT_GENERATOR = 14
_NEW_GENERATOR = 15
_SLOTS = 17  # the last is resizePrivateUse1Bytes
_DEFAULT_SEED = 67280421310721  # that of torch's own generators


def register() -> None:
    """Make ``torch.Generator(device="tpu")`` and pinning of memory work.

    Raises:
        DeviceError: If torch's hooks are laid out differently, or the rehearsal failed.
    """
    hooks, table = _inspect()

    def attempt() -> str | None:
        _register(hooks, table)
        return _problem()

    rehearse(attempt, "the device's hooks")
    _register(hooks, table)


def _inspect() -> tuple[int, int]:
    """Return the hooks object and its virtual table, after comparing it with the base class's."""
    get_hooks = native.symbol("libtorch_cpu.so", "_ZN2at6detail19getPrivateUse1HooksEv")
    get_hooks.restype = ctypes.c_void_p
    hooks = int(get_hooks() or 0)
    table = peek_pointer(hooks)
    base = native.symbol("libtorch_python.so", "_ZTVN2at25PrivateUse1HooksInterfaceE")
    base_entries = native.table_entries(native.address_of(base) + 16, _SLOTS)
    entries = native.table_entries(table, _SLOTS)
    different = {i for i in range(_SLOTS) if entries[i] != base_entries[i]}
    name = native.class_name(table)
    if different != _OVERRIDDEN or name != _KNOWN_CLASS:
        raise DeviceError(
            f"torch's backend hooks are laid out differently: {name}, {sorted(different)}"
        )
    return hooks, table


def _register(hooks: int, table: int) -> None:
    create = native.symbol("libtorch_cpu.so", "_ZN2at6detail18createCPUGeneratorEm")
    default = native.symbol("libtorch_cpu.so", "_ZN2at6detail22getDefaultCPUGeneratorEv")
    get_allocator = native.symbol("libc10.so", "_ZN3c1015GetCPUAllocatorEv")
    changes = {
        # `Generator getNewGenerator(index)` returns through memory: the result's address comes
        # first, which is also the first argument of createCPUGenerator(seed).
        _NEW_GENERATOR: native.jump_with(native.address_of(create), _DEFAULT_SEED),
        _DEFAULT_GENERATOR: native.address_of(default),  # takes no argument
        _PINNED_MEMORY_ALLOCATOR: native.address_of(get_allocator),  # takes no argument
    }
    # Python would answer these the same, but a Ctrl-C may be raised in Python (see `guard`).
    changes |= dict.fromkeys(_ANSWERED_BY_PYTHON, native.return_constant(1))
    native.replace_table(hooks, table, _SLOTS, changes)


def _problem() -> str | None:
    """Use the answers through public calls; return what is wrong with them, or None."""
    generator = torch.Generator(device="tpu").manual_seed(3)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    drawn = torch.rand(4, generator=generator, device="tpu").cpu()
    if not torch.equal(drawn, expected):
        return "a generator draws other numbers than the CPU's"
    if torch.ones(3).pin_memory().tolist() != [1.0, 1.0, 1.0]:
        return "pinned memory lost its contents"
    return None
