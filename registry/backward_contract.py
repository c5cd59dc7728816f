"""What a user's backward may ask for and must return, whichever framework it is written in."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpu_kernels.dsl.annotations import resolve
from tpu_kernels.dsl.source import locate, unwrap
from tpu_kernels.dsl.spec import KernelSpec, Parameter
from tpu_kernels.errors import GradientError, SignatureError

LANGUAGES = ("jax", "torch")


@dataclasses.dataclass(frozen=True)
class Backward:
    """A user's backward function.

    Attributes:
        fn: ``fn(grad, <what it asks for by name>)``.
        kernel: Qualified name of the kernel.
        tensors: The kernel's tensor parameters.
        names: What it asks for by name.
        takes_all: Whether it takes every input, by ``**inputs``.
        where: ``file:line`` of the function.
    """

    fn: Callable[..., Any]
    kernel: str
    tensors: tuple[Parameter, ...]
    names: tuple[str, ...]
    takes_all: bool
    where: str

    @property
    def wants_outputs(self) -> bool:
        """Whether it asks for the outputs."""
        return "out" in self.names

    def __call__(self, grads: Sequence[Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Call the function.

        Args:
            grads: A gradient for each output.
            values: Everything that it may ask for.

        Returns:
            Gradients by input name; None, or nothing, for an input without.

        Raises:
            GradientError: It returned something else.
        """
        given = {n: v for n, v in values.items() if self.takes_all or n in self.names}
        return self._by_name(self.fn(grads[0] if len(grads) == 1 else tuple(grads), **given))

    def _by_name(self, result: Any) -> dict[str, Any]:
        names = [p.name for p in self.tensors]
        if isinstance(result, Mapping):
            for name in result:
                if name not in names:
                    raise self.error(
                        f"its backward returned a gradient for {name!r}, which is no tensor input",
                        hint=f"tensor inputs: {', '.join(names)}",
                    )
            return dict(result)
        if len(names) == 1 and hasattr(result, "shape"):
            return {names[0]: result}
        if isinstance(result, tuple) and len(result) == len(names):
            return dict(zip(names, result, strict=True))
        got = type(result).__name__
        raise self.error(
            "its backward must return a dict of gradients by input name, or a tuple with one for"
            f" each of {', '.join(names)}; got "
            + (f"{len(result)} gradients" if isinstance(result, tuple) else got)
        )

    def items(self, name: str, grad: Any, count: int) -> Sequence[Any]:
        """The gradients of a list of tensors.

        Raises:
            GradientError: Their number is another.
        """
        if grad is None:
            return [None] * count
        if not isinstance(grad, (list, tuple)) or len(grad) != count:
            got = f"{len(grad)} entries" if isinstance(grad, (list, tuple)) else "no entries"
            raise self.error(f"gradient of {name!r} has {got} for {count} tensors")
        return grad

    def check(self, name: str, value: Any, grad: Any) -> None:
        """Check a gradient against the input that it belongs to.

        Raises:
            GradientError: Its shape or dtype is another.
        """
        shape = tuple(grad.shape) if hasattr(grad, "shape") else None
        if shape is None or len(shape) != len(value.shape) or shape != tuple(value.shape):
            got = type(grad).__name__ if shape is None else shape
            raise self.error(f"gradient of {name!r} has shape {got}, expected {tuple(value.shape)}")
        if grad.dtype != value.dtype:
            raise self.error(f"gradient of {name!r} is {grad.dtype}, expected {value.dtype}")

    def error(self, problem: str, hint: str | None = None) -> GradientError:
        """An error that names kernel and function."""
        return GradientError(f"kernel {self.kernel!r}: {problem}", where=self.where, hint=hint)


def read(fn: Callable[..., Any], spec: KernelSpec, extra: Sequence[str] = ()) -> Backward:
    """A user's function as a `Backward`.

    Args:
        fn: The function.
        spec: The kernel.
        extra: What it may ask for besides inputs, ``out`` and ``needs_input_grad``.

    Raises:
        GradientError: It asks for what there is not.
    """
    try:
        accepted = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:  # no function, or one written in C
        raise GradientError(
            f"kernel {spec.name!r}: its backward is no function that can be read: {fn!r}",
            where=str(spec.source),
            hint="write it as fn(grad, <inputs by name>)",
        ) from error
    source = locate(fn)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    backward = Backward(
        fn,
        spec.name,
        tuple(p for p in spec.op_parameters if p.kind.is_tensor),
        tuple(p.name for p in accepted[1:]),
        any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted),
        str(source),
    )
    if not accepted or accepted[0].kind not in positional:
        raise backward.error(
            "its backward takes no gradient", hint="write it as fn(grad, <inputs by name>)"
        )
    known = {p.name for p in spec.op_parameters} | {"out", "needs_input_grad", *extra}
    for p in accepted[1:]:
        if p.name not in known and p.default is p.empty and not backward.takes_all:
            raise backward.error(
                f"its backward asks for {p.name!r}, which is not an input",
                hint=f"available: {', '.join(sorted(known))}",
            )
    return backward


def language_of(fn: Callable[..., Any], caller_locals: Mapping[str, Any]) -> str:
    """Whether a backward is written for JAX arrays or torch tensors.

    Args:
        fn: The function: in JAX if it is wrapped by JAX (`jax.jit`, `jax.custom_vjp`), or a
            parameter is annotated with `jax.Array`.
        caller_locals: Local names of the scope that defines it, for postponed annotations.

    Returns:
        ``"jax"`` or ``"torch"``.

    Example:
        >>> import jax
        >>> def one(grad: jax.Array, x: jax.Array): ...
        >>> def other(grad, x): ...
        >>> language_of(one, {}), language_of(other, {}), language_of(jax.jit(other), {})
        ('jax', 'torch', 'jax')
    """
    if type(fn).__module__.split(".")[0] in ("jax", "jaxlib"):
        return "jax"
    inner = unwrap(fn)
    if not getattr(inner, "__annotations__", None):
        return "torch"
    try:
        annotations = resolve(inner, caller_locals, "")
    except SignatureError:  # a name for type checkers alone; torch functions may have those
        texts = [a for a in inner.__annotations__.values() if isinstance(a, str)]
        return "jax" if any("jax.Array" in text for text in texts) else "torch"
    return "jax" if any(map(_is_jax, annotations.values())) else "torch"


def _is_jax(annotation: Any) -> bool:
    import jax

    if annotation is jax.Array or getattr(annotation, "array_type", None) is jax.Array:
        return True
    return any(map(_is_jax, typing.get_args(annotation)))
