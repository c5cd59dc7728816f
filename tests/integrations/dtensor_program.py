"""One rank of the distributed tests: runs every check of this file, and writes which failed.

``python -m tests.integrations.dtensor_program RANK WORLD_SIZE FOLDER``
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import tpu_kernels as tk

Check = Callable[[DeviceMesh], None]
CHECKS: dict[str, Check] = {}
Array = jax.Array


def check(fn: Check) -> Check:
    """Make a function one of the checks."""
    CHECKS[fn.__name__] = fn
    return fn


# ---------------------------------------------------------------------------- kernels
@tk.tpu_kernel("dt::mm", sharding="m k, k n -> m n; sum k")
def mm(x: Array, w: Array) -> Array:
    return x @ w


@tk.tpu_kernel("dt::affine", sharding="... h, h, ... h -> ... h", vmap=None)
def affine(x: Array, bias: Array | None, *, y: Array, alpha: float = 1.0) -> Array:
    out = x * alpha + y
    return out if bias is None else out + bias


@tk.tpu_kernel("dt::total", sharding="b h -> b h, b; sum h")
def total(xs: list[Array]) -> tuple[Array, Array]:
    out = sum(xs[1:], xs[0])
    return out * 2, out.sum(1)


@tk.tpu_kernel("dt::softmax", sharding="b h! -> b h!")
def softmax(x: Array) -> Array:
    return jax.nn.softmax(x)


@tk.tpu_kernel("dt::largest", sharding="b h -> b; max h")
def largest(x: Array) -> Array:
    return x.max(1)


@tk.tpu_kernel("dt::loss", sharding="b h, b h ->; sum b h")
def loss(x: Array, y: Array) -> Array:
    return (x * y).sum()


@tk.tpu_kernel("dt::norule")
def norule(x: Array) -> Array:
    return x / x.sum()


@tk.tpu_kernel("dt::append", mutates_args=("cache",), sharding="b s! h, b h -> b")
def append(cache: Array, new: Array, position: int = 0) -> Array:
    return new.sum(1) * 0 + 1, {"cache": cache.at[:, position].set(new)}


@tk.tpu_kernel("dt::double", sharding="b h -> b h; linear x")
def double(x: Array) -> Array:
    return x * 2


@tk.tpu_kernel("dt::constant", sharding="b h -> b h")
def constant(x: Array) -> Array:
    return jnp.ones((8, 8)) + x.sum()


@tk.tpu_kernel("dt::hand_written", sharding="b h, h -> b h")
def hand_written(x: Array, w: Array) -> Array:
    return x * w


@hand_written.backward
def _(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": grad * w, "w": (grad * x).sum(0)}


# ---------------------------------------------------------------------------- helpers
def whole_numbers(*shape: int) -> torch.Tensor:
    """Small integers as floats: sums of them are exact in any order."""
    return torch.randint(-4, 5, shape).float()


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """A tensor on a mesh; partial sums are made of unequal parts."""
    kept = [Replicate() if isinstance(p, Partial) else p for p in placements]
    result = distribute_tensor(tensor, mesh, kept)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = result.to_local()
    for dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            size = mesh.size(dim)
            part = coordinate[dim] - 1.0
            # The parts -1, 0, 1, ... add up to a multiple of the whole; the last takes the rest.
            rest = 1.0 - sum(i - 1.0 for i in range(size - 1))
            local = local * (rest if coordinate[dim] == size - 1 else part)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def every_placement(mesh: DeviceMesh, *dims: int, limit: int = 16) -> list[Any]:
    """Placements for tensors of these numbers of dimensions; a fixed sample if there are many."""
    kinds = [[Replicate(), Partial(), *(Shard(i) for i in range(n))] for n in dims]
    each = [list(itertools.product(k, repeat=mesh.ndim)) for k in kinds]
    combinations = list(itertools.product(*each))
    random.Random(0).shuffle(combinations)
    return combinations[:limit]


def agree(kernel: Any, mesh: DeviceMesh, tensors: list[torch.Tensor], placements: Any) -> DTensor:
    """Compare a call on DTensors, and its gradients, with the call on whole tensors."""
    plain = [t.clone().requires_grad_() for t in tensors]
    distributed = [
        placed(t, mesh, p).detach().requires_grad_()
        for t, p in zip(tensors, placements, strict=True)
    ]
    expected, got = kernel(*plain), kernel(*distributed)
    with torch.no_grad():
        quiet = kernel(*distributed)
    outputs = (
        [(expected, got, quiet)]
        if isinstance(got, DTensor)
        else zip(expected, got, quiet, strict=True)
    )
    loss, distributed_loss = 0.0, 0.0
    for e, g, q in outputs:
        assert torch.equal(g.full_tensor(), e), placements
        assert torch.equal(q.full_tensor(), e)
        assert not q.requires_grad
        weight = torch.arange(1.0, e.numel() + 1).view_as(e)
        loss = loss + (e * weight).sum()
        distributed_loss = (
            distributed_loss
            + (g.redistribute(placements=[Replicate()] * mesh.ndim).to_local() * weight).sum()
        )
    torch.autograd.backward(loss)
    torch.autograd.backward(distributed_loss)
    for p, d in zip(plain, distributed, strict=True):
        assert d.grad is not None
        assert torch.equal(d.grad.full_tensor(), p.grad), (placements, d.grad, p.grad)
    return got if isinstance(got, DTensor) else got[0]


def raises(error: type[Exception], fragment: str, call: Callable[[], Any]) -> None:
    """Fail unless the call raises an error whose message has the fragment."""
    with pytest.raises(error) as caught:
        call()
    assert fragment in str(caught.value)


# ---------------------------------------------------------------------------- checks
@check
def matmul_agrees_in_every_placement(mesh: DeviceMesh) -> None:
    x, w = whole_numbers(8, 4), whole_numbers(4, 12)
    for placements in every_placement(mesh, 2, 2):
        agree(mm, mesh, [x, w], placements)


@check
def a_matmul_moves_nothing_where_it_need_not(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    x, w = whole_numbers(8, 4), whole_numbers(4, 12)
    rest = [Replicate()] * (mesh.ndim - 1)
    for given, expected in {
        (Shard(0), Replicate()): Shard(0),
        (Replicate(), Shard(1)): Shard(1),
        (Shard(1), Shard(0)): Partial(),
        (Replicate(), Replicate()): Replicate(),
    }.items():
        a, b = (placed(t, mesh, [p, *rest]) for t, p in zip((x, w), given, strict=True))
        with CommDebugMode() as communication:
            out = mm(a, b)
        assert out.placements == (expected, *rest), (given, out.placements)
        assert communication.get_total_counts() == 0


@check
def sizes_that_do_not_divide(mesh: DeviceMesh) -> None:
    x, w = whole_numbers(7, 5), whole_numbers(5, 3)
    for placements in every_placement(mesh, 2, 2, limit=6):
        agree(mm, mesh, [x, w], placements)


@check
def keywords_statics_absent_arguments_and_batch_axes(mesh: DeviceMesh) -> None:
    x, bias, y = whole_numbers(4, 2, 8), whole_numbers(8), whole_numbers(4, 2, 8)
    rest = [Replicate()] * (mesh.ndim - 1)
    for dim in (0, 2):
        dx, dy = (placed(t, mesh, [Shard(dim), *rest]) for t in (x, y))
        db = placed(bias, mesh, [Replicate()] * mesh.ndim)
        out = affine(dx, db, y=dy, alpha=3.0)
        assert out.placements[0] == Shard(dim)
        assert torch.equal(out.full_tensor(), affine(x, bias, y=y, alpha=3.0))
        out = torch.ops.dt.affine(dx, None, y=dy)
        assert out.placements[0] == Shard(dim)
        assert torch.equal(out.full_tensor(), x + y)
    agree(
        lambda a, b, c: affine(a, b, y=c),
        mesh,
        [x, bias, y],
        [[Shard(2), *rest]] + [[Replicate()] * mesh.ndim] * 2,
    )


@check
def lists_and_several_results(mesh: DeviceMesh) -> None:
    tensors = [whole_numbers(4, 8), whole_numbers(4, 8)]
    for placements in every_placement(mesh, 2, 2, limit=5):
        agree(lambda *xs: total(list(xs)), mesh, tensors, placements)
    columns = [Shard(1)] + [Replicate()] * (mesh.ndim - 1)
    out, sums = total([placed(t, mesh, columns) for t in tensors])
    assert out.placements[0] == Shard(1)
    assert sums.placements[0] == Partial("sum")


@check
def whole_axes_are_gathered(mesh: DeviceMesh) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for placement, expected in ((Shard(0), Shard(0)), (Shard(1), None)):
        out = softmax(placed(x, mesh, [placement] * mesh.ndim))
        assert expected is None or out.placements == (expected,) * mesh.ndim
        assert all(p != Shard(1) for p in out.placements)
        torch.testing.assert_close(out.full_tensor(), x.softmax(1))


@check
def results_that_combine_by_max(mesh: DeviceMesh) -> None:
    x = torch.randperm(32).float().view(4, 8)
    columns = [Shard(1)] + [Replicate()] * (mesh.ndim - 1)
    out = largest(placed(x, mesh, columns))
    assert out.placements[0] == Partial("max")
    assert torch.equal(out.full_tensor(), x.max(1).values)
    agree(largest, mesh, [x], [columns])


@check
def partial_sums_pass_through_a_linear_kernel(mesh: DeviceMesh) -> None:
    x = whole_numbers(4, 8)
    out = agree(double, mesh, [x], [[Partial()] * mesh.ndim])
    assert out.placements == (Partial("sum"),) * mesh.ndim


@check
def a_result_without_dimensions(mesh: DeviceMesh) -> None:
    x, y = whole_numbers(4, 8), whole_numbers(4, 8)
    out = agree(loss, mesh, [x, y], [[Shard(0)] * mesh.ndim, [Shard(0)] * mesh.ndim])
    assert out.placements == (Partial("sum"),) * mesh.ndim
    assert out.shape == ()


@check
def without_a_rule_everything_is_replicated(mesh: DeviceMesh) -> None:
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    out = norule(placed(x, mesh, [Shard(0)] * mesh.ndim))
    assert out.placements == (Replicate(),) * mesh.ndim
    torch.testing.assert_close(out.full_tensor(), x / x.sum())


@check
def written_arguments_stay_where_they_are(mesh: DeviceMesh) -> None:
    new = whole_numbers(4, 6)
    rest = [Replicate()] * (mesh.ndim - 1)
    for cache_at, new_at in (
        (Shard(0), Shard(0)),
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
    ):
        cache = placed(torch.zeros(4, 5, 6), mesh, [cache_at, *rest])
        version, storage = cache._version, cache.to_local().data_ptr()
        assert torch.equal(
            append(cache, placed(new, mesh, [new_at, *rest]), 3).full_tensor(), torch.ones(4)
        )
        expected = torch.zeros(4, 5, 6)
        expected[:, 3] = new
        assert torch.equal(cache.full_tensor(), expected)
        assert cache._version > version
        assert cache.to_local().data_ptr() == storage
    cache = placed(torch.zeros(4, 6, 6), mesh, [Shard(1), *rest])
    raises(
        tk.ArgumentError,
        "cannot write to 'cache'",
        lambda: append(cache, placed(new, mesh, [Replicate()] * mesh.ndim)),
    )


@check
def rules_as_functions_and_replaced_rules(mesh: DeviceMesh) -> None:
    x, w = whole_numbers(4, 8), whole_numbers(8)
    rows = [Shard(0)] + [Replicate()] * (mesh.ndim - 1)
    whole = [Replicate()] * mesh.ndim

    @hand_written.register_sharding
    def rule(x: Any, w: Any) -> Any:
        assert x.shape == (4, 8)
        return [([Shard(0)], [Shard(0), Replicate()]), ([Shard(-1)], [Shard(-1), Shard(0)])]

    assert agree(hand_written, mesh, [x, w], [rows, whole]).placements[0] == Shard(0)
    columns = [Shard(1)] * mesh.ndim
    assert agree(hand_written, mesh, [x, w], [columns, whole]).placements == tuple(columns)
    hand_written.register_sharding(lambda x, w: [([Shard(0)], [Shard(5), Replicate()])])
    raises(
        tk.ArgumentError,
        "sharding function",
        lambda: hand_written(placed(x, mesh, rows), placed(w, mesh, whole)),
    )
    hand_written.register_sharding("b h, h -> b h")
    assert agree(hand_written, mesh, [x, w], [rows, whole]).placements[0] == Shard(0)


@check
def mistakes_are_named(mesh: DeviceMesh) -> None:
    rows = [Shard(0)] * mesh.ndim
    x = placed(whole_numbers(8, 8), mesh, rows)
    raises(tk.ArgumentError, "plain tensor among DTensors", lambda: mm(x, whole_numbers(8, 8)))
    raises(
        tk.ArgumentError,
        "sharding rule gives it 2",
        lambda: mm(x, placed(whole_numbers(8), mesh, rows)),
    )
    one = placed(
        whole_numbers(1), mesh, [Replicate()] * mesh.ndim
    )  # the kernel itself would broadcast
    raises(tk.ArgumentError, "axis 'h' has size 8", lambda: hand_written(x, one))
    raises(tk.ArgumentError, "sharding rule is wrong", lambda: constant(x))
    x.requires_grad_()
    raises(tk.ArgumentError, "plain tensor among DTensors", lambda: mm(x, whole_numbers(8, 8)))


@check
def a_model_trains_as_on_one_device(mesh: DeviceMesh) -> None:
    x, w1, w2 = whole_numbers(8, 4), whole_numbers(4, 8) / 8, whole_numbers(8, 4) / 8
    rest = [Replicate()] * (mesh.ndim - 1)

    def train(x: Any, *weights: Any) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(w.clone()) for w in weights]
        optimizer = torch.optim.AdamW(parameters, lr=0.125)
        for _ in range(3):
            hidden = mm(x, parameters[0]).relu()
            (mm(hidden, parameters[1]) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in parameters]

    expected = train(x, w1, w2)
    got = train(
        placed(x, mesh, [Replicate()] * mesh.ndim),
        placed(w1, mesh, [Shard(1), *rest]),  # column parallel, then row parallel
        placed(w2, mesh, [Shard(0), *rest]),
    )
    for e, g in zip(expected, got, strict=True):
        torch.testing.assert_close(g.full_tensor(), e)
    assert got[0].placements[0] == Shard(1)
    assert got[1].placements[0] == Shard(0)


@check
def second_derivatives_agree(mesh: DeviceMesh) -> None:
    x, w = whole_numbers(8, 4), whole_numbers(4, 4)
    for kernel, plain in ((mm, torch.mm), (hand_written, torch.mul)):
        b = w if kernel is mm else w[0]

        def second(function: Any, tensors: Any) -> list[Any]:
            leaves = [t.detach().requires_grad_() for t in tensors]
            out = function(*leaves)
            (first,) = torch.autograd.grad((out * out).sum(), leaves[0], create_graph=True)
            return list(torch.autograd.grad((first * first).sum(), leaves))

        expected = second(plain, [x, b])
        for placements in every_placement(mesh, x.ndim, b.ndim):
            given = [placed(t, mesh, p) for t, p in zip((x, b), placements, strict=True)]
            for e, g in zip(expected, second(kernel, given), strict=True):
                torch.testing.assert_close(g.full_tensor(), e)


@check
def compiled_graphs_agree(mesh: DeviceMesh) -> None:
    for backend in ("aot_eager", "tpu"):
        _compiled_graphs_agree(mesh, backend)


def _compiled_graphs_agree(mesh: DeviceMesh, backend: str) -> None:
    torch._dynamo.reset()
    x, w = whole_numbers(8, 4), whole_numbers(4, 8)
    rest = [Replicate()] * (mesh.ndim - 1)
    compiled = torch.compile(lambda a, b: mm(a, b) * 2, backend=backend, fullgraph=True)
    for differentiate in (False, True):
        dx = placed(x, mesh, [Shard(0), *rest]).detach().requires_grad_(differentiate)
        dw = placed(w, mesh, [Replicate()] * mesh.ndim).detach().requires_grad_(differentiate)
        out = compiled(dx, dw)
        assert out.placements[0] == Shard(0)
        assert torch.equal(out.full_tensor(), x @ w * 2)
        if differentiate:
            out.sum().backward()
            assert torch.equal(dw.grad.full_tensor(), 2 * x.t() @ torch.ones(8, 8))


def main(rank: int, world_size: int, folder: Path) -> None:
    """Run all checks and write ``{check: None or traceback}``."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    mesh = init_device_mesh("cpu", (2, 2) if world_size == 4 else (world_size,))
    results: dict[str, str | None] = {}
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            function(mesh)
            results[name] = None
        except BaseException:  # pytest's own failures are not Exceptions
            results[name] = traceback.format_exc()
            # Ranks fail alike or not at all; after a failure of one, collectives would hang.
        (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
