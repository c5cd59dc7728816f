"""Every private name of torch that the package uses, one small function each, with the reason.

Nothing else in the package may reach into torch's private names, so that an upgrade of torch means
reading this file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import operator as operators
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

_Class = TypeVar("_Class")

# ---------------------------------------------------------------------------------------------
# Simulated "tpu" device (backends/device). torch offers a Python backend for PrivateUse1 only
# through private names; the device is plain Python because of them.

# The DLPack capsule without the public functions' checks: those refuse tensors that require a
# gradient, and compare device names with "privateuseone" literally, which a renamed backend fails.
to_dlpack: Callable[[torch.Tensor], Any] = torch._C._to_dlpack
from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack


def privateuse1_name() -> str:
    """Return the name that the PrivateUse1 dispatch key goes by (``privateuseone`` if
    unclaimed)."""
    return str(torch._C._get_privateuse1_backend_name())


def claim_privateuse1(name: str, module: object) -> None:
    """Rename PrivateUse1, and give it Python-written hooks, device guard and ``torch.<name>``.

    There is no public function for a backend without C++ code; this is the one that torch tests.
    Its own stand-ins for hooks and guard are Python functions, which torch calls from C++ that must
    not throw: a Ctrl-C that arrives in one of them ends the process. Ours are callables written in
    C, in which no signal is handled.
    """
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    def always(value: object) -> Any:
        return staticmethod(itertools.repeat(value).__next__)

    class Guard(torch._C._acc.DeviceGuard):
        type_ = always(torch._C._autograd.DeviceType.PrivateUse1)

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        is_available = always(True)
        is_built = always(True)
        has_primary_context = staticmethod(functools.partial(operators.lt, -1))  # every index

    _setup_privateuseone_for_python_backend(
        name, backend_module=module, hook=Hooks(), device_guard=Guard()
    )


def redispatcher(operator: OpOverload) -> Callable[..., Any]:
    """Return ``fn(keyset, *args, **kwargs)`` that runs one operator's kernel for a key set.

    `OpOverload.redispatch` does the same with a Python frame more (0.3 µs of 1.5).
    """
    return operator._handle.redispatch_boxed


def key_set(key: str) -> Any:
    """Return the dispatch key set that holds one key, by its name such as ``"CPU"``."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))


def registered_operators(key: str) -> frozenset[str]:
    """Return the names (``aten::add.Tensor``) of all operators with a kernel for a dispatch key."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))


# Which storage a tensor has, as a number; `untyped_storage()` makes an object (0.1 µs against 0.5).
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]


# A storage on memory that somebody else owns, and a device tensor whose storage has no memory yet:
# what deferred results are made of.
storage_on_memory: Callable[[int, torch.device, int], Any] = (
    torch._C._construct_storage_from_data_pointer
)
tensor_without_memory: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] = (
    torch._C._acc.create_empty_tensor
)


def before_data_ptr(hook: Callable[[int], None]) -> None:
    """Call a function with a storage's id before anybody is told where its memory is.

    torch has no hook for that, and deferred results have no memory until somebody asks.
    """
    of_tensor, of_storage = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr

    @functools.wraps(of_tensor)
    def tensor_data_ptr(self: torch.Tensor) -> int:
        if self.layout is torch.strided and self.device.type == "tpu":
            hook(storage_id(self))
        return of_tensor(self)

    @functools.wraps(of_storage)
    def storage_data_ptr(self: torch.UntypedStorage) -> int:
        hook(self._cdata)
        return of_storage(self)

    torch.Tensor.data_ptr = tensor_data_ptr  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.data_ptr = storage_data_ptr  # type: ignore[method-assign, assignment]


# The autograd node that the calling thread runs the backward of, None outside of one: it knows the
# forward's traceback while anomaly mode is on, and no public function leads to it.
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node


def exclude_keys(keys: Any) -> AbstractContextManager[None]:
    """Return a context in which the dispatcher skips the given keys, as C++ autocast kernels do."""
    return torch._C._ExcludeDispatchKeyGuard(keys)


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the lazy negation bit flipped; only ``imag`` of a conjugate shows it."""
    return torch._neg_view(tensor)


def privateuse1_device_type() -> int:
    """Return ``c10::DeviceType::PrivateUse1`` as the number that C++ stores."""
    number: Any = torch._C._autograd.DeviceType.PrivateUse1  # the stub hides that it is one
    return int(number)


def replace_accelerator_functions(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Replace C functions behind ``torch.accelerator`` that a Python backend cannot provide.

    Args:
        functions: By the name after ``torch._C._accelerator_``, such as ``synchronizeDevice``.
    """
    for name, function in functions.items():
        setattr(torch._C, f"_accelerator_{name}", function)


def dlpack_by_name(name: str) -> None:
    """Let `torch.from_dlpack` take tensors of the renamed PrivateUse1 device.

    ``Tensor.__dlpack_device__`` compares the device's name with "privateuse1" literally, so it
    raises for a device that was given a name.
    """
    before = torch.Tensor.__dlpack_device__

    @functools.wraps(before)
    def __dlpack_device__(self: torch.Tensor) -> Any:
        if type(self) in (torch.Tensor, torch.nn.Parameter) and self.device.type == name:
            return torch.utils.dlpack.DLDeviceType.kDLExtDev, self.device.index or 0
        return before(self)

    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign]


def library_folder() -> Path:
    """Return the folder of torch's shared libraries (``libc10.so``, ``libtorch_cpu.so``)."""
    return Path(torch.__file__).parent / "lib"


def aot_backend(
    compiler: Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    decompositions: Mapping[OpOverload, Callable[..., Any]],
) -> Callable[..., Any]:
    """Return a Dynamo backend that compiles forward, backward and inference graphs of ATen
    operators.

    The public `torch.compile` takes such a backend but offers no public way to build one that gets
    the backward graph as well.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def compile_boxed(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return make_boxed_func(compiler(gm, inputs))

    return aot_autograd(fw_compiler=compile_boxed, decompositions=dict(decompositions))


def register_dynamo_backend(name: str, backend: Callable[..., Any]) -> None:
    """Make ``torch.compile(backend=name)`` find a backend, unless the name is taken.

    Normally the package's entry point does this; a source tree on the path has none.
    """
    from torch._dynamo.backends import registry

    if name not in registry._COMPILER_FNS:
        registry.register_backend(backend, name=name)


# ---------------------------------------------------------------------------------------------
# Operators (registry). Own kernels for the Autograd key are the only way that works under
# torch.func (torch.library.register_autograd raises there) and costs little (facts: 4 us against
# 10).


def below_autograd() -> AbstractContextManager[None]:
    """Return a context in which operators run below autograd, as torch's own autograd kernels
    do."""
    return torch._C._AutoDispatchBelowAutograd()


def after_autograd_keys() -> Any:
    """Return the dispatch key set of everything below autograd."""
    return torch._C._after_autograd_keyset


@functools.cache
def plain_key_set(backend_key: str) -> int:
    """Return, as a number, the key set with which autograd kernels see plain tensors outside of any
    mode.

    Args:
        backend_key: Such as ``"CPU"``. Anything else that is active (a dispatch mode, a transform
            of `torch.func`, a version-counter kernel of the operator) adds keys of its own.
    """
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, backend_key))
    keys |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autograd{backend_key}"))
    return int(keys.raw_repr())


def after_version_counter_keys() -> Any:
    """Return the dispatch key set of everything below ADInplaceOrView, which bumps version
    counters."""
    return torch._C._after_ADInplaceOrView_keyset


def functorch_active() -> bool:
    """Return whether a `torch.func` transform is active in this thread."""
    return bool(torch._C._are_functorch_transforms_active())


def forward_ad_module() -> Any:
    """Return the module whose ``_current_level`` says whether forward mode is active (-1: no).

    There is no public question for it, and an operator's autograd kernel asks on every call.
    """
    from torch.autograd import forward_ad

    return forward_ad


def single_level_function() -> type:
    """Return the base class of autograd functions that run below functorch's layers.

    A kernel for the Autograd key is called when functorch has peeled its layers off; there the
    public `torch.autograd.Function` would start over at the top and recurse.
    """
    return torch.autograd.function._SingleLevelFunction


@contextlib.contextmanager
def outer_levels_differentiate() -> Iterator[None]:
    """Return a context that lets outer `torch.func` transforms differentiate what an autograd
    function runs.

    An autograd function switches both modes of differentiation off while it runs. Below it, with
    transforms active, lie further levels that are to be differentiated: without this,
    `torch.func.jvp` of `torch.func.grad` would silently return zeros. torch's own functions for
    nested levels do the same.
    """
    if not functorch_active():
        yield
        return
    from torch.autograd import forward_ad

    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def apply_single_level(function: type, *args: Any) -> Any:
    """Apply a `single_level_function` class, also while a `torch.func` transform is active."""
    if not functorch_active():
        return function.apply(*args)  # type: ignore[attr-defined]
    from torch._functorch.autograd_function import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return function.apply(*args)  # type: ignore[attr-defined]


def batching_kernel(
    arguments: Callable[[Sequence[Any], dict[str, Any]], Sequence[Any]],
    call: Callable[..., Any],
    rule: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a kernel for the FuncTorchBatched key (with key set): `torch.vmap` of an operator.

    `torch.library.register_vmap` refuses operators with keyword-only tensors, since torch unpacks
    the batched tensors of positional arguments alone. Here all arguments are positional.

    Args:
        arguments: Turns what the dispatcher passes into all arguments in schema order.
        call: Runs the operator on all its arguments in schema order.
        rule: ``rule(info, in_dims, *arguments)``, as for `torch.library.register_vmap`.
    """

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._functorch.autograd_function import custom_function_call_vmap_helper
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        interpreter: Any = retrieve_current_functorch_interpreter()
        return custom_function_call_vmap_helper(interpreter, rule, call, *arguments(args, kwargs))

    return kernel


def compiles_as(
    function_of: Callable[[Any], Callable[..., Any]],
) -> Callable[[type[_Class]], type[_Class]]:
    """Return a class decorator that makes `torch.compile(instance)` compile a function instead.

    Dynamo keeps what it compiled with the code object, and gives all callables that are no
    functions the same one: the ninth instance would hit the limit of recompilations. These two
    attributes are how Dynamo itself finds the function behind a wrapper.

    Args:
        function_of: The function of an instance; its code object must be its own.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        cls._torchdynamo_orig_callable = property(function_of)  # type: ignore[attr-defined]
        cls._torchdynamo_wrapper_id = property(id)  # type: ignore[attr-defined]
        return cls

    return decorate


def symbol_of(size: Any) -> str | None:
    """Return the text of a symbolic size's expression, or None for a size that is a plain
    number."""
    if not isinstance(size, torch.SymInt):
        return None
    return None if size.node.maybe_as_int() is not None else str(size.node.expr)


# ---------------------------------------------------------------------------------------------
# ATen overrides (registry/overrides). torch has public functions to register a kernel and to fetch
# the one before it, but none to take one out again, and none that makes compiled graphs notice.

# One Python object per thread and key, which the autograd engine carries into its own threads (a
# `threading.local` is not): an override scope must also hold for the backward that it starts.
thread_object: Callable[[str], Any] = torch._C._get_obj_in_tls
set_thread_object: Callable[[str, Any], None] = torch._C._stash_obj_in_tls
has_thread_object: Callable[[str], bool] = torch._C._is_key_in_tls


def schema_of(operator: OpOverload) -> Any:
    """Return the `FunctionSchema` of an operator (``OpOverload`` has no public accessor)."""
    return operator._schema


def has_kernel(operator: OpOverload, key: str) -> bool:
    """Return whether an operator has a kernel registered at exactly this dispatch (or alias)
    key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key))


def dispatch_table(operator: OpOverload) -> str:
    """Return the dispatcher's computed table of an operator, one line per dispatch key."""
    return str(torch._C._dispatch_dump_table(operator.name()))


def destroy_library(library: torch.library.Library) -> None:
    """Take a library's operators and kernels out of torch now; at its collection is too late.

    When the object is collected torch does it once more by the operators' names, and would make
    ``torch.ops`` forget the operators that have taken those names in the meantime.
    """
    library._destroy()
    library._op_defs.clear()


def forget_dispatch(operator: OpOverload, key: str) -> None:
    """Drop torch's memory of which kernel a key resolves to, which registrations do not refresh.

    The Python dispatcher, under which graphs are traced, caches the resolution for good: without
    this an override is ignored, or a removed one still looked for, by the next `torch.compile`.
    """
    operator._uncache_dispatch(getattr(torch.DispatchKey, key))


def after_import(module: str, hook: Callable[[Any], None]) -> None:
    """Run ``hook(module)`` now if a module is imported, else right after its import.

    Importing `torch._dynamo` costs two seconds that eager users should not pay.
    """
    if module in sys.modules:
        hook(sys.modules[module])
        return

    class _AfterImport(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            if name != module or self not in sys.meta_path:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            if spec is None or spec.loader is None:
                return spec
            execute = spec.loader.exec_module

            def exec_module(loaded: ModuleType) -> None:
                execute(loaded)
                hook(loaded)

            spec.loader.exec_module = exec_module  # type: ignore[assignment, method-assign]
            return spec

    sys.meta_path.insert(0, _AfterImport())


def guard_every_graph(key: Callable[[], Any]) -> None:
    """Make each graph that Dynamo compiles from now on depend on the value of ``key()``.

    Dynamo guards what the traced Python code reads; which kernels the dispatcher holds is not among
    it, and there is no public way to add a guard of one's own to every graph.

    Args:
        key: Cheap and hashable; a compiled graph is reused only while it returns an equal value.
    """

    def install(output_graph: Any) -> None:
        from torch._dynamo.guards import get_verbose_code_parts
        from torch._dynamo.source import GlobalStateSource

        original = output_graph.OutputGraph.init_ambient_guards

        def init_ambient_guards(self: Any) -> None:
            original(self)
            expected = key()

            def OVERRIDES(builder: Any, guard: Any) -> None:
                code = [f"tpu_kernels: overrides in force == {expected!r}"]
                builder.guard_manager.root.add_lambda_guard(
                    lambda _: key() == expected,
                    get_verbose_code_parts(code, guard),
                    guard.user_stack,
                )

            self.guards.add(GlobalStateSource().make_guard(OVERRIDES))

        output_graph.OutputGraph.init_ambient_guards = init_ambient_guards

    after_import("torch._dynamo.output_graph", install)


def before_every_graph(on_compile: Callable[[], None]) -> None:
    """Call a function at the start of each compilation by Dynamo, in its thread.

    torch has no public place for that.
    """

    def install(output_graph: Any) -> None:
        original = output_graph.OutputGraph.init_ambient_guards

        def init_ambient_guards(self: Any) -> None:
            on_compile()
            original(self)

        output_graph.OutputGraph.init_ambient_guards = init_ambient_guards

    after_import("torch._dynamo.output_graph", install)


def forget_compiled_code() -> None:
    """Drop the code that Dynamo has compiled so far (nothing if Dynamo was never imported)."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset_code_caches()


# Inductor's module that refuses, while it is imported, to give a fallback to an operator (such as
# fused attention) that its decomposition table names; entries can only be added afterwards.
INDUCTOR_READY = "torch._inductor.lowering"


def inductor_decompositions(*, executed: bool = False) -> list[dict[Any, Callable[..., Any]]]:
    """Return Inductor's live decomposition tables, none while Inductor is not imported.

    The second, of random operators, comes before the first where Inductor draws random numbers
    itself. Call `refresh_inductor_decompositions` after a change.

    Args:
        executed: That the module is complete, where Python calls it incomplete until its import
            returns: in a hook of `after_import`.
    """
    ready = sys.modules.get(INDUCTOR_READY)
    if ready is None or (not executed and getattr(ready.__spec__, "_initializing", False)):
        return []
    module = sys.modules["torch._inductor.decomposition"]
    return [module.decompositions, module.extra_random_decomps]


def refresh_inductor_decompositions() -> None:
    """Drop Inductor's cached copy of its decomposition table."""
    module = sys.modules.get("torch._inductor.decomposition")
    if module is not None:
        module.fast_random_decomps.cache_clear()


def operator_samples_database() -> list[Any]:
    """Return torch's own list of operators with sample inputs (`OpInfo`).

    It is what torch tests itself with, and not public. The import takes seconds.
    """
    from torch.testing._internal import common_methods_invocations as database

    names = [name for name in dir(database) if name == "op_db" or name.startswith("foreach_")]
    return [info for name in names if name.endswith("_db") for info in getattr(database, name)]


# ---------------------------------------------------------------------------------------------
# DTensor (integrations/dtensor). Everything else there is public.


def has_dtensor_strategy(operator: OpOverload) -> bool:
    """Return whether DTensor has a sharding rule for an operator; there is no public question."""
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    return operator in propagator.op_strategy_funcs or operator in propagator.op_to_rules


def implicit_replication_allowed() -> bool:
    """Return whether `torch.distributed.tensor.experimental.implicit_replication` is in force."""
    return bool(torch._C._get_dtensor_allow_implicit_replication())


# ---------------------------------------------------------------------------------------------
# TorchTPU's source interface (integrations/torchtpu).


def dispatch_key_of_device(device_type: str) -> str:
    """Return the dispatch key of a device type: ``"CPU"`` for ``"cpu"``."""
    return str(torch._C._dispatch_key_for_device(device_type))


# ---------------------------------------------------------------------------------------------
# Lowering of graphs (lowering, backends/compile_backend).


def expression_of(size: Any) -> Any | None:
    """Return a symbolic size's sympy expression, None if it is a plain number."""
    if not isinstance(size, torch.SymInt):
        return None
    return None if size.node.maybe_as_int() is not None else size.node.expr


def bounds_of(size: Any) -> tuple[int, int] | None:
    """Return the least and the greatest value of a symbolic size, None if it has no greatest."""
    expression = expression_of(size)
    if expression is None:
        return None
    found = size.node.shape_env.bound_sympy(expression)
    if not (found.lower.is_Integer and found.upper.is_Integer) or found.upper >= 2**31:
        return None
    return int(found.lower), int(found.upper)


def fake_mode() -> Any:
    """Return a fresh mode in which tensors have no values; torch exports none publicly."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def functional_graph(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
    *,
    keep_meta: bool = False,
) -> torch.fx.GraphModule:
    """Trace a function to a graph of ATen operators that writes to nothing but its inputs.

    `make_fx` is the tracer below `torch.export`, which would wrap the function in a module first.

    Args:
        function: Function of tensors.
        inputs: Fake tensors.
        decompositions: How operators are expressed in others.
        keep_meta: Whether nodes keep what `torch.fx.traceback` knew when they were made.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    # The Python dispatcher knows that batch norm writes to its statistics; its schema does not.
    with enable_python_dispatcher():
        graph = make_fx(function, decomposition_table=dict(decompositions))(*inputs)
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        if any(isinstance(t, OpOverload) and t._schema.is_mutable for t in targets):
            # In a second step: the first would not see into composite operators.
            run = torch.fx.Interpreter(graph).run if keep_meta else graph
            functional = torch.func.functionalize(run, remove="mutations_and_views")
            graph = make_fx(functional, decomposition_table=dict(decompositions))(*inputs)
    return graph


def all_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions: those into core ATen first, then its reference functions."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    return {**decomposition_table, **core_aten_decompositions()}


def can_decompose(operator: OpOverload) -> bool:
    """Return whether an operator is defined by other operators for every device."""
    return operator._can_decompose()


# FlexAttention ------------------------------------------------------------------------------------


def items_are_indices() -> AbstractContextManager[Any]:
    """Return a context in which ``table[i]`` with a traced tensor `i` is an operator.

    FlexAttention traces mods under it; without it torch asks the tensor for its value.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def flex_operators() -> tuple[Any, Any]:
    """Return FlexAttention's higher-order operators, forward and backward: not exported."""
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    return flex_attention, flex_attention_backward


def flex_dense_math() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what computes FlexAttention's operators on devices without a kernel."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    forward, backward = flex_operators()
    return forward.py_kernels[key], backward.py_kernels[key]


def implement_flex(
    module: Any, forward: Callable[..., Any], backward: Callable[..., Any], device: str
) -> None:
    """Give FlexAttention an implementation for the renamed PrivateUse1 device.

    Args:
        module: `torch.nn.attention.flex_attention`, whose list of devices is closed.
        forward: Takes the arguments of the operator ``flex_attention``.
        backward: Takes those of ``flex_attention_backward``.
        device: Name of the device.
    """
    keys: Any = torch._C.DispatchKey
    operators = flex_operators()
    for operator, function in zip(operators, (forward, backward), strict=True):
        operator.py_impl(keys.PrivateUse1)(function)
    autocast = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def in_autocast(query: Any, key: Any, value: Any, *args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        narrow = [x.to(dtype) if x.is_floating_point() else x for x in (query, key, value)]
        with exclude_keys(autocast):
            return operators[0](*narrow, *args)

    operators[0].py_impl(keys.AutocastPrivateUse1)(in_autocast)
    before = module._validate_device

    def _validate_device(query: Any, key: Any, value: Any) -> None:
        if query.device.type != device:
            before(query, key, value)
        elif not torch.compiler.is_compiling():
            # what it warns of is not so on this device: nothing materialises the scores
            module._WARNINGS_SHOWN.add("flex_attention_performance")

    module._validate_device = _validate_device
