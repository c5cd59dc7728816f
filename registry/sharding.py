"""Sharding rules: how a kernel may be split over devices, written like an einsum.

``"m k, k n -> m n; sum k"`` names every axis of every tensor argument and result. Axes of one name
are split together. What follows from a rule is a list of `Choice`: the ways to split a call over
one dimension of a device mesh. This module knows nothing of `torch.distributed`;
`tpu_kernels.integrations.dtensor` runs the choices.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tpu_kernels.dsl.spec import KernelSpec
from tpu_kernels.errors import ArgumentError, SignatureError
from tpu_kernels.registry.layout import Layout, flat_names

Spot = int | str | None
"""One tensor in a choice: the dimension that is split, how partial values combine, or None."""

REDUCTIONS = ("sum", "max", "min")
ELLIPSIS = "..."
UNNAMED = "_"
_NAME = re.compile(r"[A-Za-z]\w*")
_SYNTAX = (
    'write axes as names separated by spaces, tensors by commas: "rows d!, d -> rows d!"; mark what'
    " cannot be split with !, and declare what is summed: '; sum k'"
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to split a call over the devices of one mesh dimension.

    Attributes:
        inputs: A `Spot` for each tensor argument of the flat call.
        outputs: A `Spot` for each tensor of the flat result.
    """

    inputs: tuple[Spot, ...]
    outputs: tuple[Spot, ...]

    @property
    def splits_work(self) -> bool:
        """Whether devices compute different things; if not, all compute everything."""
        return any(spot is not None for spot in (*self.inputs, *self.outputs))


@dataclasses.dataclass(frozen=True, eq=False)
class EinsumRule:
    """A parsed sharding rule.

    Attributes:
        kernel: Qualified name of the kernel, for messages.
        text: The rule as written.
        where: ``file:line`` of the kernel, for messages.
        inputs: Axis names of each tensor parameter.
        outputs: Axis names of each result slot.
        whole: Axes that are never split.
        reductions: By axis: how results without that axis combine.
        linear: Parameters in which the kernel is linear, so that they may hold partial sums.
    """

    kernel: str
    text: str
    where: str
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    whole: frozenset[str]
    reductions: Mapping[str, str]
    linear: tuple[str, ...]

    def choices(
        self,
        spec: KernelSpec,
        layout: Layout,
        input_shapes: Sequence[Sequence[Any]],
        output_shapes: Sequence[Sequence[Any]],
        output_slots: Sequence[int],
    ) -> list[Choice]:
        """The ways to split one call; the last is to split nothing.

        Args:
            spec: The kernel.
            layout: Which tensors the call has.
            input_shapes: Shape of each tensor of the flat call.
            output_shapes: Shape of each tensor of the flat result.
            output_slots: The result slot of each tensor of the flat result.

        Raises:
            ArgumentError: A tensor has another number of axes than the rule says, or axes of one
                name differ in size.
        """
        names = flat_names(spec.op_parameters, layout)
        owners = [name.split("[")[0] for name in names]
        tensors = [p.name for p in spec.op_parameters if p.kind.is_tensor]
        sizes: dict[str, tuple[Any, str]] = {}
        ins = [
            self._bind(self.inputs[tensors.index(owner)], shape, f"argument {name!r}", sizes)
            for owner, name, shape in zip(owners, names, input_shapes, strict=True)
        ]
        order = list(sizes)
        outs = [
            self._bind(self.outputs[slot], shape, f"result {slot}", sizes)
            for slot, shape in zip(output_slots, output_shapes, strict=True)
        ]
        written = [i for i, owner in enumerate(owners) if owner in spec.mutates_args]
        found = []
        for axis in order:
            if any(axes.count(axis) > 1 for axes in (*ins, *outs)):
                continue  # a diagonal cannot be split along one dimension
            inputs = tuple(_position(axes, axis) for axes in ins)
            outputs = tuple(_position(axes, axis, self.reductions.get(axis)) for axes in outs)
            if None not in outputs and all(inputs[i] is not None for i in written):
                found.append(Choice(inputs, outputs))
        for parameter in self.linear:
            partial = tuple("sum" if owner == parameter else None for owner in owners)
            if any(partial):
                found.append(Choice(partial, ("sum",) * len(outs)))
        return [*found, Choice((None,) * len(ins), (None,) * len(outs))]

    def _bind(
        self,
        term: Sequence[str],
        shape: Sequence[Any],
        what: str,
        sizes: dict[str, tuple[Any, str]],
    ) -> list[str | None]:
        """The name of each axis of a tensor, None for one that is not split; checks and collects
        sizes."""
        spread = len(shape) - len(term) + 1 if ELLIPSIS in term else 0
        if spread < 0 or (ELLIPSIS not in term and len(shape) != len(term)):
            raise ArgumentError(
                f"kernel {self.kernel!r}: {what} has {len(shape)} dimensions, its sharding rule "
                "gives it"
                f" {len(term)} ({' '.join(term) or 'none'})",
                where=self.where,
                hint=f"the rule is {self.text!r}; {_SYNTAX}",
            )
        axes: list[str | None] = []
        for name in term:
            # Batch axes line up at the right, as in broadcasting.
            axes += (
                [f"{ELLIPSIS}{spread - i}" for i in range(spread)] if name == ELLIPSIS else [name]
            )
        for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
            if (
                axis is None
                or axis == UNNAMED
                or axis in self.whole
                or (axis.startswith(ELLIPSIS) and size == 1)
            ):
                axes[i] = None
                continue
            known, first = sizes.setdefault(axis, (size, what))
            if known != size:
                raise ArgumentError(
                    f"kernel {self.kernel!r}: axis {axis!r} has size {known} in {first} and "
                    f"{size} in {what}",
                    where=self.where,
                    hint=f"the sharding rule is {self.text!r}: axes of one name are split "
                    "together and must agree;"
                    " mark the axis as whole (name!) or give it another name",
                )
        return axes


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionRule:
    """A rule as a function, with the contract of
    `torch.distributed.tensor.experimental.register_sharding`.

    Attributes:
        kernel: Qualified name of the kernel, for messages.
        fn: ``fn(<arguments of the operator>)`` returns a list of (output placements, input
            placements).
        where: ``file:line`` of the kernel, for messages.
    """

    kernel: str
    fn: Callable[..., Sequence[tuple[Sequence[Any], Sequence[Any]]]]
    where: str


Rule = EinsumRule | FunctionRule


def _position(axes: Sequence[str | None], axis: str, otherwise: Spot = None) -> Spot:
    return axes.index(axis) if axis in axes else otherwise


def read_rule(sharding: Any, spec: KernelSpec) -> Rule | None:
    """The rule that a ``sharding`` option states.

    Args:
        sharding: A string, a function, or None.
        spec: The kernel that it belongs to.

    Returns:
        The rule, or None for None.

    Raises:
        SignatureError: The string cannot be parsed or does not fit the kernel's signature; says
            what is wrong.

    Example:
        >>> import jax
        >>> from tpu_kernels.dsl.jax_frontend import Options, from_function
        >>> def mm(x: jax.Array, w: jax.Array) -> jax.Array: ...
        >>> rule = read_rule("m k, k n -> m n; sum k", from_function(mm, "doc::mm", Options()))
        >>> rule.inputs, rule.outputs, rule.reductions
        ((('m', 'k'), ('k', 'n')), (('m', 'n'),), {'k': 'sum'})
    """
    if sharding is None:
        return None
    where = str(spec.source)
    if isinstance(sharding, str):
        return _Parser(sharding, spec).rule()
    if callable(sharding):
        return FunctionRule(spec.name, sharding, where)
    raise SignatureError(
        f"kernel {spec.name!r}: sharding is a {type(sharding).__name__}, not a string or a "
        "function",
        where=where,
        hint=_SYNTAX,
    )


class _Parser:
    def __init__(self, text: str, spec: KernelSpec) -> None:
        self.text = text
        self.spec = spec
        self.whole: set[str] = set()

    def fail(self, problem: str, hint: str = _SYNTAX) -> SignatureError:
        return SignatureError(
            f"kernel {self.spec.name!r}: sharding rule {self.text!r}: {problem}",
            where=str(self.spec.source),
            hint=hint,
        )

    def rule(self) -> EinsumRule:
        spec = self.spec
        mapping, *clauses = self.text.split(";")
        sides = mapping.split("->")
        slots = len(spec.returns.slots)
        if len(sides) > 2 or (len(sides) == 1 and slots):
            raise self.fail(f"it has {len(sides) - 1} arrows '->', and needs one")
        tensors = [p.name for p in spec.op_parameters if p.kind.is_tensor]
        inputs = self._terms(sides[0], len(tensors), f"tensor parameters ({', '.join(tensors)})")
        outputs = self._terms(sides[1] if len(sides) == 2 else "", slots, "results")
        reductions, linear = self._clauses(
            [c for c in clauses if c.strip()], inputs, outputs, tensors
        )
        return EinsumRule(
            kernel=spec.name,
            text=self.text,
            where=str(spec.source),
            inputs=inputs,
            outputs=outputs,
            whole=frozenset(self.whole),
            reductions=reductions,
            linear=linear,
        )

    def _terms(self, side: str, expected: int, what: str) -> tuple[tuple[str, ...], ...]:
        parts = side.split(",") if side.strip() or expected else []
        if len(parts) != expected:
            raise self.fail(f"it describes {len(parts)} tensors, the kernel has {expected} {what}")
        return tuple(tuple(self._axes(part)) for part in parts)

    def _axes(self, term: str) -> Iterator[str]:
        tokens = term.replace(ELLIPSIS, f" {ELLIPSIS} ").split()
        if tokens.count(ELLIPSIS) > 1:
            raise self.fail(f"{term.strip()!r} has more than one '...'")
        for token in tokens:
            name = token.removesuffix("!")
            if token not in (ELLIPSIS, UNNAMED) and not _NAME.fullmatch(name):
                raise self.fail(f"{token!r} is not an axis")
            if token.endswith("!"):
                self.whole.add(name)
            yield name

    def _clauses(
        self,
        clauses: Sequence[str],
        inputs: Sequence[Sequence[str]],
        outputs: Sequence[Sequence[str]],
        tensors: Sequence[str],
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        reductions: dict[str, str] = {}
        linear: list[str] = []
        known = {name for term in inputs for name in term} - {ELLIPSIS, UNNAMED}
        for clause in clauses:
            word, *names = clause.replace(",", " ").split()
            if word == "linear" and names:
                for name in names:
                    if name not in tensors:
                        raise self.fail(
                            f"'linear {name}' names no tensor parameter",
                            f"they are {', '.join(tensors)}",
                        )
                linear += names
                continue
            if word not in REDUCTIONS or not names:
                raise self.fail(
                    f"clause {clause.strip()!r} is not understood",
                    "after ';' write 'sum k' (or max, min) for an axis that is reduced, or "
                    "'linear x'",
                )
            for name in names:
                if name not in known:
                    raise self.fail(
                        f"'{word} {name}' names no axis of an argument",
                        f"they are {', '.join(sorted(known))}",
                    )
                if name in self.whole:
                    raise self.fail(
                        f"axis {name!r} is marked whole (!) and reduced by {word!r}", "choose one"
                    )
                if outputs and all(name in term for term in outputs):
                    raise self.fail(
                        f"'{word} {name}': every result has that axis, so it is not reduced",
                        "leave it out",
                    )
                reductions[name] = word
        if self.spec.mutates_args and linear:
            raise self.fail(
                "'linear' cannot be used by a kernel that writes to its arguments", "leave it out"
            )
        return reductions, tuple(linear)
