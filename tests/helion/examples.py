"""Which of the example kernels run on the CPU, pass the checks, and compile for a TPU.

    python -m tests.helion.examples [NAMES] [--target v6e] [--check]

prints the table of docs/helion.md, with the reason for each kernel that does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

import tpu_kernels as tk
from tests.helion import example_kernels, kernels
from tpu_kernels.errors import KernelError

FP8 = torch.float8_e4m3fn


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@dataclasses.dataclass(frozen=True)
class Example:
    """A kernel with small arguments.

    Attributes:
        args: Its arguments.
        reference: The same in torch.
        tolerance: Largest error, relative to the largest value: the rounding of float32 grows with
            the number of terms that are added.
        options: Of the decorator.
    """

    args: tuple[Any, ...]
    reference: Callable[..., Any]
    tolerance: float = 1024 * torch.finfo(torch.float32).eps
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def _offsets(*sizes: int) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def _segments(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    bounds = offsets.tolist()
    return torch.stack([x[a:b].sum(0) for a, b in itertools.pairwise(bounds)])


def _moe(x: torch.Tensor, experts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    bounds = offsets.tolist()
    parts = [x[a:b] @ experts[i] for i, (a, b) in enumerate(itertools.pairwise(bounds))]
    return torch.cat(parts)


def _jagged(values: torch.Tensor, offsets: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, bounds = y.clone(), offsets.tolist()
    for row, (a, b) in enumerate(itertools.pairwise(bounds)):
        out[row, : b - a] += values[a:b]
    return out


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _rms_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    F.rms_norm(leaf, (x.shape[-1],), weight, 1e-5).backward(grad)
    assert leaf.grad is not None
    return leaf.grad


def _swiglu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Any:
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    (F.silu(leaves[0]) * leaves[1]).backward(grad)
    return leaves[0].grad, leaves[1].grad


def _jsd(p: torch.Tensor, q: torch.Tensor) -> Any:
    a, b = p.exp(), q.exp()
    middle = (0.5 * (a + b)).log()
    loss = (0.5 * (a * (p - middle) + b * (q - middle))).sum()
    return loss, 0.5 * a * (p - middle)


def _chunk_state(b: torch.Tensor, x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    weight = (decay[:, -1:] - decay).exp()
    return torch.einsum("cld,cln->cdn", b * weight[..., None], x)


def _delta_states(w: torch.Tensor, u: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    state, states = torch.zeros(k.shape[2], u.shape[2]), []
    for chunk in range(len(k)):
        states.append(state)
        state = state + k[chunk].T @ (u[chunk] - w[chunk] @ state)
    return torch.stack(states)


def _fp8_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q.float() @ k.float().mT).softmax(-1) @ v.float()


def _grpo(logs: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    ratio, gain = (logs - old).exp(), advantage[:, None]
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)


_square = randn(64, 256).softmax(-1)
_chunks = (0.1 * randn(3, 64, 128), randn(3, 64, 128), 0.1 * randn(3, 64, 128))

EXAMPLES: dict[str, Example] = {
    "long_sum": Example((randn(16, 512),), lambda x: x.sum(-1)),
    "welford": Example(
        (randn(256), randn(256), randn(64, 256)), lambda w, b, x: F.layer_norm(x, (256,), w, b)
    ),
    "softmax_two_pass": Example((randn(16, 512),), lambda x: x.softmax(-1)),
    "softmax_backward": Example(
        (randn(64, 256), _square), lambda g, o: g * o - o * (g * o).sum(-1, keepdim=True)
    ),
    "batch_softmax": Example((randn(2, 16, 128),), lambda x: x.softmax(-1)),
    "geglu": Example(
        (randn(16, 128), randn(16, 128)), lambda a, b: F.gelu(a, approximate="tanh") * b
    ),
    "exp_backward": Example((randn(16, 128), randn(16, 128)), lambda g, o: g * o),
    "swiglu_backward": Example((randn(16, 128), randn(16, 128), randn(16, 128)), _swiglu_backward),
    "rms_norm_backward": Example((randn(64, 128), randn(64, 128), randn(128)), _rms_backward),
    "sum_backward_of_weight": Example(
        (randn(64, 128), randn(64, 128)), lambda g, x: (g * x).sum(0)
    ),
    "addmm": Example((randn(128), randn(64, 256), randn(256, 128)), torch.addmm),
    "broadcast_matmul": Example((randn(2, 64, 128), randn(128, 128)), torch.matmul),
    "matmul_split_k": Example((randn(64, 256), randn(256, 128)), torch.mm),
    "matmul_layernorm": Example(
        (randn(64, 128), randn(128, 256), randn(256), randn(256)),
        lambda x, y, w, b: F.layer_norm(x @ y, (256,), w, b),
    ),
    "matmul_gelu_epilogue": Example(
        (randn(64, 128), randn(128, 128), randn(64, 128)), lambda x, y, r: (x @ y + r).relu()
    ),
    "kl_div": Example(
        (randn(64, 257)[:, 1:].log_softmax(-1), _square),
        lambda logs, p: F.kl_div(logs, p, reduction="batchmean"),
    ),
    "jsd": Example((randn(64, 128).log_softmax(-1), randn(64, 129)[:, 1:].log_softmax(-1)), _jsd),
    "cross_entropy": Example(
        (randn(32, 128), torch.arange(32, dtype=torch.int32)),
        lambda x, labels: F.cross_entropy(x, labels.long()),
    ),
    "cross_entropy_one_hot": Example(
        (randn(32, 128), torch.arange(32, dtype=torch.int32)),
        lambda x, labels: F.cross_entropy(x, labels.long()),
    ),
    "embedding": Example(
        (torch.arange(32, dtype=torch.int32).view(4, 8) * 3, randn(100, 128)),
        lambda x, w: w[x.long()],
    ),
    "gather_gemv": Example(
        (randn(4, 64, 128), torch.tensor([2, 0], dtype=torch.int32), randn(128)),
        lambda w, idx, x: w[idx.long()] @ x,
    ),
    "rope": Example((randn(64, 256), randn(64, 128), randn(64, 129)[:, 1:]), _rope),
    "bf16_int16_gemm": Example(
        (
            randn(64, 128).bfloat16(),
            torch.arange(128 * 128, dtype=torch.int16).view(128, 128) % 15 - 7,
        ),
        lambda x, w: x.float() @ w.float(),
        tolerance=2**-8,  # of bfloat16
    ),
    "fp8_gemm": Example(
        (randn(64, 128).to(FP8), randn(128, 128).to(FP8), randn(64)),
        lambda x, y, s: x.float() @ y.float() * s[:, None],
        tolerance=2**-8,
    ),
    "causal_attention": Example(
        (randn(2, 128, 64),) * 3,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
    "fp8_attention": Example(
        (randn(1, 128, 64).div(8).to(FP8),) * 3, _fp8_attention, tolerance=2**-3
    ),
    "squeeze_excite": Example(
        (randn(64, 256), 0.1 * randn(256, 128), 0.1 * randn(128, 256)),
        lambda x, a, b: x * torch.sigmoid((x @ a).relu() @ b),
    ),
    "se_block": Example(
        (randn(64, 128), 0.1 * randn(128, 128)), lambda x, w: 2 * x * torch.sigmoid(x @ w)
    ),
    "mamba2_chunk_state": Example(
        (randn(2, 64, 128), randn(2, 64, 128), randn(2, 64).abs().cumsum(1).neg() * 0.1),
        _chunk_state,
    ),
    "gated_delta_states": Example(_chunks, _delta_states),
    "segment_sum": Example((randn(64, 128), _offsets(10, 0, 33, 21)), _segments),
    "jagged_dense_add": Example((randn(40), _offsets(10, 9, 21), randn(3, 32)), _jagged),
    "low_mem_dropout": Example((randn(16, 128), 0.0, 7), lambda x, p, seed: x),
    "int4_gemm": Example(
        (randn(32, 64), torch.zeros(32, 128, dtype=torch.int8)),
        lambda x, w: torch.zeros(32, 128),
    ),
    "concat_rows": Example((randn(16, 128), randn(16, 256)), lambda x, y: torch.cat([x, y], 1)),
    "cumulative_sum": Example((randn(16, 128),), lambda x: x.cumsum(1)),
    "arg_max": Example((randn(16, 128),), lambda x: x.argmax(1).to(torch.int32)),
    "grpo_loss": Example((randn(16, 128), randn(17, 128)[1:], randn(16)), _grpo),
    "moe_matmul": Example((randn(96, 128), randn(3, 128, 128), _offsets(32, 40, 24)), _moe),
}


def operator(name: str) -> Any:
    """The operator of an example."""
    own = getattr(example_kernels, name, None) or getattr(kernels, name)
    example = EXAMPLES[name]
    return tk.tpu_kernel(
        f"helion_examples::{name}", reference=example.reference, **example.options
    )(own)


def error_of(result: Any, expected: Any) -> float:
    """The largest error of any result, relative to its reference's largest value."""
    results = result if isinstance(result, tuple) else (result,)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    worst = 0.0
    for got, want in zip(results, wanted, strict=True):
        if got.shape != want.shape:
            return math.inf
        error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(1e-30)
        worst = max(worst, float("inf") if error.isnan() else float(error))
    return worst


def _attempt(work: Callable[[], str]) -> str:
    try:
        return work()
    except (KernelError, TypeError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0][:160]}"


def run(name: str) -> str:
    """``"ok"``, or what is wrong with the result on the CPU."""
    example = EXAMPLES[name]
    error = error_of(operator(name)(*example.args), example.reference(*example.args))
    return "ok" if error <= example.tolerance else f"wrong: relative error {error:.2g}"


def compiled(name: str, target: str) -> str:
    """The status of its compilation, with the compiler's reason."""
    report = tk.compile(operator(name), EXAMPLES[name].args, target=target, timeout_s=120)
    if report.status == "ok":
        return "ok"
    return f"{report.status}: {(report.error or '').splitlines()[0][:160]}"


def checked(name: str) -> str:
    """The passes of `tk.check` that fail."""
    passes = ("numerics", "races", "bounds", "nan")
    report = tk.check(operator(name), EXAMPLES[name].args, passes=passes, target=None)
    bad = [
        f"{row.name}: {row.status}" for row in report.rows if row.status not in ("ok", "skipped")
    ]
    return ", ".join(bad) or "ok"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--target", default="v6e")
    parser.add_argument(
        "--check", action="store_true", help="run the TPU interpreter's checks, too"
    )
    options = parser.parse_args()
    console = Console(width=1000, highlight=False, markup=False)
    console.print(f"| kernel | CPU | checks | {options.target} |\n|---|---|---|---|")
    good = {"cpu": 0, "compiler": 0}
    for name in options.names:
        cpu = _attempt(lambda name=name: run(name))  # type: ignore[misc]
        check = _attempt(lambda name=name: checked(name)) if options.check else ""  # type: ignore[misc]
        compiler = _attempt(lambda name=name: compiled(name, options.target))  # type: ignore[misc]
        good["cpu"] += cpu == "ok"
        good["compiler"] += compiler == "ok"
        console.print(f"| {name} | {cpu} | {check} | {compiler} |")
    console.print(f"{len(options.names)} kernels: {good}")


if __name__ == "__main__":
    main()
