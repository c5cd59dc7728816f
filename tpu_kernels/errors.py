"""Every error that the package raises on purpose, one class per kind of mistake.

An error's first line says what is wrong and names the kernel, its second line says where (the
author's file and line, when there is one), and the last says what to do. `KernelError` catches them
all; each class also derives from the built-in that Python code expects, so ``except TypeError``
keeps working.
"""

from __future__ import annotations

FIRST_LINE_LIMIT = 200  # characters; longer first lines get lost in logs and test summaries


class KernelError(Exception):
    """Base of all errors of `tpu_kernels`.

    Args:
        problem: What is wrong, in the user's terms; names the kernel and the argument.
        where: ``file:line`` of the user's source, if known.
        hint: What to do about it.

    Example:
        >>> str(KernelError("kernel 'tpu::f': block is odd", where="f.py:3", hint="make it even"))
        "kernel 'tpu::f': block is odd\\n  at f.py:3\\n  hint: make it even"
    """

    def __init__(self, problem: str, *, where: str | None = None, hint: str | None = None) -> None:
        first, _, rest = problem.partition("\n")
        if len(first) > FIRST_LINE_LIMIT:
            rest = "\n".join(filter(None, ("… " + first[FIRST_LINE_LIMIT - 1 :], rest)))
            first = first[: FIRST_LINE_LIMIT - 1] + "…"
        lines = [first]
        if where:
            lines.append(f"  at {where}")
        if rest:
            lines.append(rest)
        if hint:
            lines.append(f"  hint: {hint}")
        super().__init__("\n".join(lines))
        self.problem = problem
        self.where = where
        self.hint = hint


class SignatureError(KernelError, TypeError):
    """A kernel's Python signature cannot become an operator schema."""


class ArgumentError(KernelError, ValueError):
    """A call passed a value that the kernel does not take."""


class DTypeError(KernelError, TypeError):
    """A tensor has a dtype that the kernel, the policy or the target does not take."""


class DeviceError(KernelError, RuntimeError):
    """Tensors sit on the wrong device, on several devices, or the device is not available."""


class NameClashError(KernelError):
    """Two different places define a kernel of the same name."""


class TraceError(KernelError, RuntimeError):
    """The kernel's own Python code raised while JAX traced it."""


class TraceTimeout(TraceError, TimeoutError):
    """The kernel's own Python code did not end while JAX traced it."""


class MissingBackwardError(KernelError, RuntimeError):
    """A gradient was asked of a kernel that has no backward."""


class GradientError(KernelError, RuntimeError):
    """A user-defined backward returned gradients that do not fit the inputs."""


class ConfigError(KernelError, ValueError):
    """A config names an unknown parameter or holds a value that the kernel refuses."""


class OverrideError(KernelError, RuntimeError):
    """An ATen override cannot be registered, or its result differs from the original's contract."""


class CompileError(KernelError, RuntimeError):
    """The TPU compiler refused a program."""


class UnsupportedOnTarget(CompileError):
    """The program is fine, but this TPU generation cannot run it."""


class TuningError(KernelError, RuntimeError):
    """No configuration of a kernel could be compiled or measured."""


class BoundsError(KernelError, IndexError):
    """An index lies outside of the dimension that it indexes (debug mode)."""


class NonFiniteError(KernelError, FloatingPointError):
    """An operator made a NaN out of finite values (debug mode)."""


class NonFiniteWarning(RuntimeWarning):
    """An operator made an infinity out of finite values (debug mode)."""


class CheckError(KernelError, RuntimeError):
    """A kernel failed the checks that debug mode runs on its calls."""


class DeferredError(KernelError, RuntimeError):
    """A tensor has no value, because an operator that deferred mode ran before it failed."""


class BundleError(KernelError, ValueError):
    """A file of kernels cannot be written, is damaged, or does not fit the versions here."""


class CacheCorruption(UserWarning):
    """A damaged cache entry was ignored."""


class MissingDependency(KernelError, ImportError):
    """An optional package is needed and absent; the message says how to install it."""


class CacheUnwritable(UserWarning):
    """A cache folder cannot be written: results are kept in memory only."""


class VersionError(KernelError, ImportError):
    """Two installed packages are of versions that do not work together."""


class VersionWarning(UserWarning):
    """Packages are of versions that nobody has tested together."""
