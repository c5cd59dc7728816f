"""Kernels that do what Helion's published examples do, written anew for small shapes."""

from __future__ import annotations

import math

import helion
import helion.language as hl
import torch

Config = helion.Config


@helion.kernel(config=Config(block_sizes=[8, 128]))
def long_sum(x: torch.Tensor) -> torch.Tensor:
    m, n = x.shape
    out = torch.empty([m], dtype=x.dtype, device=x.device)
    for rows in hl.tile(m):
        acc = hl.zeros([rows], dtype=torch.float32)
        for columns in hl.tile(n):
            acc = acc + x[rows, columns].to(torch.float32).sum(-1)
        out[rows] = acc.to(x.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[32, 128, 128]))
def welford(
    weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    m, n = x.shape
    out = torch.empty_like(x)
    for rows in hl.tile(m):
        count = hl.zeros([rows], dtype=torch.float32)
        mean = hl.zeros([rows], dtype=torch.float32)
        spread = hl.zeros([rows], dtype=torch.float32)
        for columns in hl.tile(n):
            chunk = x[rows, columns]
            size = chunk.size(-1)
            chunk_mean = torch.sum(chunk, dim=-1) / size
            chunk_spread = torch.sum(chunk * chunk, dim=-1) - size * chunk_mean * chunk_mean
            delta = chunk_mean - mean
            total = count + size
            mean = mean + delta * (size / total)
            spread = spread + chunk_spread + delta * delta * count * (size / total)
            count = total
        scale = torch.rsqrt(spread / count + eps)
        for columns in hl.tile(n):
            centred = (x[rows, columns] - mean[:, None]) * scale[:, None]
            out[rows, columns] = centred * weight[columns][None, :] + bias[columns][None, :]
    return out


@helion.kernel(config=Config(block_sizes=[8, 128, 128]))
def softmax_two_pass(x: torch.Tensor) -> torch.Tensor:
    m, n = x.shape
    out = torch.empty_like(x)
    for rows in hl.tile(m):
        top = hl.full([rows], float("-inf"), dtype=torch.float32)
        total = hl.zeros([rows], dtype=torch.float32)
        for columns in hl.tile(n):
            values = x[rows, columns]
            higher = torch.maximum(top, torch.amax(values, dim=1))
            total = total * torch.exp(top - higher)
            total = total + torch.exp(values - higher[:, None]).sum(dim=1)
            top = higher
        for columns in hl.tile(n):
            out[rows, columns] = torch.exp(x[rows, columns] - top[:, None]) / total[:, None]
    return out


@helion.kernel(config=Config(block_sizes=[8]))
def softmax_backward(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    m, _ = grad.shape
    result = torch.empty_like(grad)
    for rows in hl.tile(m):
        weighted = grad[rows, :] * out[rows, :]
        inner = torch.sum(weighted, dim=1, keepdim=True)
        result[rows, :] = weighted - out[rows, :] * inner
    return result


@helion.kernel(config=Config(block_sizes=[1, 8]))
def batch_softmax(x: torch.Tensor) -> torch.Tensor:
    b, m, _ = x.shape
    out = torch.empty_like(x)
    for batch, rows in hl.tile([b, m]):
        values = x[batch, rows, :]
        shifted = torch.exp(values - torch.amax(values, dim=-1, keepdim=True))
        out[batch, rows, :] = shifted / torch.sum(shifted, dim=-1, keepdim=True)
    return out


@helion.kernel(config=Config(block_sizes=[8, 128]))
def geglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(a)
    for tile in hl.tile(a.shape):
        gate = a[tile].to(torch.float32)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        out[tile] = (0.5 * gate * (1.0 + torch.tanh(inner))).to(a.dtype) * b[tile]
    return out


@helion.kernel(config=Config(block_sizes=[8, 128]))
def exp_backward(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(grad)
    for tile in hl.tile(grad.shape):
        result[tile] = grad[tile] * out[tile]
    return result


@helion.kernel(config=Config(block_sizes=[8, 128]))
def swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    for tile in hl.tile(grad.shape):
        g = gate[tile]
        s = torch.sigmoid(g)
        of_gate[tile] = grad[tile] * up[tile] * s * (1 + g * (1 - s))
        of_up[tile] = grad[tile] * g * s
    return of_gate, of_up


@helion.kernel(config=Config(block_sizes=[32]))
def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    m, n = x.shape
    out = torch.empty_like(x)
    for rows in hl.tile(m):
        values = x[rows, :]
        scale = torch.rsqrt(torch.mean(values * values, dim=-1, keepdim=True) + eps)
        wide = grad[rows, :] * weight[:]
        inner = torch.sum(wide * values, dim=-1, keepdim=True) * scale * scale * scale / n
        out[rows, :] = wide * scale - values * inner
    return out


@helion.kernel(config=Config(block_sizes=[8]))
def sum_backward_of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A partial sum for each block of rows, added up by host code."""
    m, n = x.shape
    rows_of = hl.register_block_size(m)
    partial = torch.empty([(m + rows_of - 1) // rows_of, n], dtype=x.dtype, device=x.device)
    for rows in hl.tile(m, block_size=rows_of):
        partial[rows.id, :] = (grad[rows, :] * x[rows, :]).sum(0)
    return partial.sum(0)


@helion.kernel(config=Config(block_sizes=[64, 128, 128]))
def addmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m, k = x.shape
    n = y.size(1)
    out = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for rows, columns in hl.tile([m, n]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for inner in hl.tile(k):
            acc = torch.addmm(acc, x[rows, inner], y[inner, columns])
        out[rows, columns] = (acc + bias[columns][None, :]).to(x.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[64, 128, 128]))
def broadcast_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    b, m, k = x.shape
    n = y.size(1)
    flat = x.reshape(b * m, k)
    out = torch.empty([b * m, n], dtype=x.dtype, device=x.device)
    for rows, columns in hl.tile([b * m, n]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for inner in hl.tile(k):
            acc = torch.addmm(acc, flat[rows, inner], y[inner, columns])
        out[rows, columns] = acc.to(x.dtype)
    return out.view(b, m, n)


@helion.kernel(config=Config(block_sizes=[64, 128, 128, 128]))
def matmul_split_k(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m, k = x.shape
    n = y.size(1)
    out = torch.zeros([m, n], dtype=torch.float32, device=x.device)
    for rows, columns, outer in hl.tile([m, n, k]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for inner in hl.tile(outer.begin, outer.end):
            acc = torch.addmm(acc, x[rows, inner], y[inner, columns])
        hl.atomic_add(out, [rows, columns], acc)
    return out


@helion.kernel(config=Config(block_sizes=[32, 128]))
def matmul_layernorm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    m, k = x.shape
    n = hl.specialize(y.size(1))
    out = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for rows in hl.tile(m):
        acc = hl.zeros([rows, n], dtype=torch.float32)
        for inner in hl.tile(k):
            acc = torch.addmm(acc, x[rows, inner], y[inner, :])
        variance, mean = torch.var_mean(acc, dim=-1, keepdim=True, correction=0)
        out[rows, :] = (acc - mean) * torch.rsqrt(variance + 1e-5) * weight[:] + bias[:]
    return out


@helion.kernel(config=Config(block_sizes=[64, 128, 128]))
def matmul_gelu_epilogue(x: torch.Tensor, y: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    m, k = x.shape
    n = y.size(1)
    out = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for rows, columns in hl.tile([m, n]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for inner in hl.tile(k):
            acc = torch.addmm(acc, x[rows, inner], y[inner, columns])
        out[rows, columns] = torch.relu(acc + residual[rows, columns]).to(x.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[32, 128]))
def kl_div(logs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    m, n = logs.shape
    losses = torch.zeros([m], dtype=torch.float32, device=logs.device)
    for rows in hl.tile(m):
        total = hl.zeros([rows], dtype=torch.float32)
        for columns in hl.tile(n):
            wanted = target[rows, columns]
            ratio = torch.log(torch.clamp(wanted, min=1e-10)) - logs[rows, columns]
            total = total + torch.sum(wanted * ratio, dim=1)
        losses[rows] = total
    return losses.sum() / m


@helion.kernel(config=Config(block_sizes=[32]))
def jsd(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m, _ = p.shape
    losses = torch.empty([m], dtype=torch.float32, device=p.device)
    grads = torch.empty_like(p)
    for rows in hl.tile(m):
        a, b = torch.exp(p[rows, :]), torch.exp(q[rows, :])
        middle = torch.log(0.5 * (a + b))
        losses[rows] = torch.sum(0.5 * (a * (p[rows, :] - middle) + b * (q[rows, :] - middle)), -1)
        grads[rows, :] = 0.5 * a * (p[rows, :] - middle)
    return losses.sum(), grads


@helion.kernel(config=Config(block_sizes=[8]))
def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    m, n = logits.shape
    losses = torch.zeros([m], dtype=torch.float32, device=logits.device)
    flat = logits.view(-1)
    for rows in hl.tile(m):
        at_label = hl.load(flat, [rows.index * n + labels[rows]])
        values = logits[rows, :]
        top = torch.amax(values, dim=-1, keepdim=True)
        log_sum = torch.log(torch.sum(torch.exp(values - top), dim=-1)) + top.squeeze(-1)
        losses[rows] = log_sum - at_label
    return losses.mean()


@helion.kernel(config=Config(block_sizes=[8]))
def cross_entropy_one_hot(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The logit of the label by a comparison with the columns: what a TPU does well."""
    m, n = logits.shape
    losses = torch.zeros([m], dtype=torch.float32, device=logits.device)
    for rows in hl.tile(m):
        values = logits[rows, :]
        hit = hl.arange(n)[None, :] == labels[rows][:, None]
        top = torch.amax(values, dim=-1, keepdim=True)
        log_sum = torch.log(torch.sum(torch.exp(values - top), dim=-1)) + top.squeeze(-1)
        losses[rows] = log_sum - torch.sum(torch.where(hit, values, 0.0), dim=-1)
    return losses.mean()


@helion.kernel(config=Config(block_sizes=[8, 128]))
def embedding(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1)
    _, width = weight.size()
    out = torch.empty([flat.size(0), width], dtype=weight.dtype, device=weight.device)
    for rows, columns in hl.tile([flat.size(0), width]):
        out[rows, columns] = weight[flat[rows], columns]
    return out.view(*x.size(), width)


@helion.kernel(config=Config(block_sizes=[64, 128]))
def gather_gemv(w: torch.Tensor, idx: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    b, s, _ = w.shape
    n = idx.size(0)
    flat = w.view(b * s, w.size(2)).view(b, s, w.size(2))
    out = torch.empty([n, s], dtype=x.dtype, device=x.device)
    for which in hl.grid(n):
        expert = idx[which]
        for rows in hl.tile(s):
            acc = hl.zeros([rows], dtype=torch.float32)
            for inner in hl.tile(w.size(2)):
                acc = acc + (flat[expert, rows, inner] * x[inner][None, :]).sum(-1)
            out[which, rows] = acc.to(x.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[8, 128]))
def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    s, d = x.shape
    half = hl.specialize(d // 2)
    out = torch.empty_like(x)
    first, second = x[:, :half], x[:, half:]
    low = torch.empty([s, half], dtype=x.dtype, device=x.device)
    high = torch.empty([s, half], dtype=x.dtype, device=x.device)
    for rows, columns in hl.tile([s, half]):
        a, b = first[rows, columns], second[rows, columns]
        low[rows, columns] = a * cos[rows, columns] - b * sin[rows, columns]
        high[rows, columns] = b * cos[rows, columns] + a * sin[rows, columns]
    out[:, :half] = low
    out[:, half:] = high
    return out


@helion.kernel(config=Config(block_sizes=[64, 128, 128]))
def bf16_int16_gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    m, k = x.shape
    n = w.size(1)
    out = torch.empty([m, n], dtype=torch.bfloat16, device=x.device)
    for rows, columns in hl.tile([m, n]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for inner in hl.tile(k):
            acc = hl.dot(x[rows, inner], w[inner, columns].to(torch.bfloat16), acc=acc)
        out[rows, columns] = acc.to(torch.bfloat16)
    return out


@helion.kernel(config=Config(block_sizes=[32, 128, 128]))
def fp8_gemm(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    m, k = x.shape
    n = y.size(1)
    out = torch.empty([m, n], dtype=torch.bfloat16, device=x.device)
    for rows, columns in hl.tile([m, n]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for inner in hl.tile(k):
            acc = hl.dot(x[rows, inner], y[inner, columns], acc=acc)
        out[rows, columns] = (acc * scale[rows][:, None]).to(torch.bfloat16)
    return out


@helion.kernel(config=Config(block_sizes=[1, 64, 64]))
def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    b, s, d_dynamic = q.shape
    d = hl.specialize(d_dynamic)
    out = torch.empty_like(q)
    scale = 1.0 / math.sqrt(d)
    keys = k.transpose(1, 2)
    for batch, rows in hl.tile([b, s]):
        top = hl.full([batch, rows], float("-inf"), dtype=torch.float32)
        total = torch.full_like(top, 0.0)
        acc = hl.zeros([batch, rows, d], dtype=torch.float32)
        query = q[batch, rows, :]
        for columns in hl.tile(s):
            scores = torch.bmm(query, keys[batch, :, columns]) * scale
            seen = rows.index[:, None] >= columns.index[None, :]
            scores = torch.where(seen[None, :, :], scores, float("-inf"))
            higher = torch.maximum(top, torch.amax(scores, -1))
            p = torch.exp(scores - higher[:, :, None])
            shrink = torch.exp(top - higher)
            total = total * shrink + torch.sum(p, -1)
            acc = acc * shrink[:, :, None]
            acc = torch.baddbmm(acc, p.to(v.dtype), v[batch, columns, :])
            top = higher
        out[batch, rows, :] = (acc / total[:, :, None]).to(out.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[1, 64, 64]))
def fp8_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    b, s, d_dynamic = q.shape
    d = hl.specialize(d_dynamic)
    out = torch.empty([b, s, d], dtype=torch.float32, device=q.device)
    keys = k.transpose(1, 2)
    for batch, rows in hl.tile([b, s]):
        top = hl.full([batch, rows], float("-inf"), dtype=torch.float32)
        total = torch.full_like(top, 0.0)
        acc = hl.zeros([batch, rows, d], dtype=torch.float32)
        for columns in hl.tile(s):
            scores = hl.dot(q[batch, rows, :], keys[batch, :, columns], out_dtype=torch.float32)
            higher = torch.maximum(top, torch.amax(scores, -1))
            p = torch.exp(scores - higher[:, :, None])
            shrink = torch.exp(top - higher)
            total = total * shrink + torch.sum(p, -1)
            acc = acc * shrink[:, :, None]
            acc = hl.dot(p.to(torch.float8_e4m3fn), v[batch, columns, :], acc=acc)
            top = higher
        out[batch, rows, :] = acc / total[:, :, None]
    return out


@helion.kernel(config=Config(block_sizes=[32, 128]))
def squeeze_excite(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    m, n = x.size()
    k = hl.specialize(a.size(1))
    n = hl.specialize(n)
    out = torch.empty_like(x)
    for rows in hl.tile(m):
        acc = hl.zeros([rows, k], dtype=torch.float32)
        for inner in hl.tile(n):
            acc = torch.addmm(acc, x[rows, inner], a[inner, :])
        hidden = torch.relu(acc)
        out[rows, :] = x[rows, :] * torch.sigmoid(hidden @ b[:, :])
    return out


@helion.kernel(config=Config(block_sizes=[32, 128]))
def se_block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    m, n = x.size()
    n = hl.specialize(n)
    out = torch.empty_like(x)
    for rows, columns in hl.tile([m, n]):
        gate = torch.sigmoid(x[rows, :] @ w[:, columns])
        out[rows, columns] = 2 * x[rows, columns] * gate
    return out


@helion.kernel(config=Config(block_sizes=[64]))
def mamba2_chunk_state(b: torch.Tensor, x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """States of chunks: for each chunk the decayed sum of outer products."""
    chunks, length, d = b.shape
    n = x.size(2)
    d, n = hl.specialize(d), hl.specialize(n)
    out = torch.empty([chunks, d, n], dtype=torch.float32, device=x.device)
    for chunk in hl.grid(chunks):
        acc = hl.zeros([d, n], dtype=torch.float32)
        last = decay[chunk, length - 1]
        for step in hl.tile(length):
            weight = torch.exp(last - decay[chunk, step])
            acc = torch.addmm(acc, (b[chunk, step, :] * weight[:, None]).T, x[chunk, step, :])
        out[chunk, :, :] = acc
    return out


@helion.kernel(config=Config(block_sizes=[64]))
def gated_delta_states(w: torch.Tensor, u: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The recurrence over chunks of gated delta networks, its state kept in VMEM."""
    chunks, _, d = k.shape
    n = u.size(2)
    d, n = hl.specialize(d), hl.specialize(n)
    out = torch.empty([chunks, d, n], dtype=torch.float32, device=k.device)
    for columns in hl.tile(n):
        state = hl.zeros([d, columns], dtype=torch.float32)
        for chunk in hl.grid(chunks):
            out[chunk, :, columns] = state
            fresh = u[chunk, :, columns] - torch.matmul(w[chunk, :, :], state)
            state = torch.addmm(state, k[chunk, :, :].T, fresh)
    return out


@helion.kernel(config=Config(block_sizes=[32]))
def segment_sum(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of ragged segments added up, bounds read from a tensor."""
    segments = offsets.size(0) - 1
    width = hl.specialize(x.size(1))
    out = torch.zeros([segments, width], dtype=x.dtype, device=x.device)
    for segment in hl.grid(segments):
        acc = hl.zeros([width], dtype=torch.float32)
        for row in hl.tile(offsets[segment], offsets[segment + 1]):
            acc = acc + x[row, :].sum(0)
        out[segment, :] = acc.to(x.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[16, 16]))
def jagged_dense_add(values: torch.Tensor, offsets: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = offsets.size(0) - 1
    out = torch.zeros_like(y)
    for row in hl.tile(rows):
        starts = offsets[row]
        length = offsets[row.index + 1] - starts
        for column in hl.tile(0, length.amax()):
            inside = column.index[None, :] < length[:, None]
            loaded = hl.load(values, [starts[:, None] + column.index[None, :]], extra_mask=inside)
            out[row, column] = loaded + y[row, column]
    return out


@helion.kernel(config=Config(block_sizes=[16, 128]))
def low_mem_dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.shape):
        kept = hl.rand(tile, seed=seed) > p
        out[tile] = torch.where(kept, x[tile] / (1 - p), 0.0)
    return out


@helion.kernel(config=Config(block_sizes=[32, 128, 32]))
def int4_gemm(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    m, k = x.shape
    n = packed.size(1)
    out = torch.empty([m, n], dtype=torch.float32, device=x.device)
    for rows, columns in hl.tile([m, n]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for half in hl.tile(k // 2):
            both = packed[half, columns]
            low, high = ((both << 4) >> 4).to(torch.float32), (both >> 4).to(torch.float32)
            weights = torch.stack([low, high], dim=1).reshape(half.block_size * 2, -1)
            inner = x[rows, half.begin * 2 + hl.arange(half.block_size * 2)]
            acc = acc + inner @ weights
        out[rows, columns] = acc
    return out


@helion.kernel(config=Config(block_sizes=[16]))
def concat_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two tensors side by side: each is a slice of the result that host code makes."""
    m = x.size(0)
    a, b = hl.specialize(x.size(1)), hl.specialize(y.size(1))
    out = torch.empty([m, a + b], dtype=x.dtype, device=x.device)
    for rows in hl.tile(m):
        out[rows, :a] = x[rows, :]
        out[rows, a:] = y[rows, :]
    return out


@helion.kernel(config=Config(block_sizes=[16]))
def cumulative_sum(x: torch.Tensor) -> torch.Tensor:
    m, _ = x.shape
    out = torch.empty_like(x)
    for rows in hl.tile(m):
        out[rows, :] = torch.cumsum(x[rows, :], dim=1)
    return out


@helion.kernel(config=Config(block_sizes=[16]))
def arg_max(x: torch.Tensor) -> torch.Tensor:
    m, _ = x.shape
    out = torch.empty([m], dtype=torch.int32, device=x.device)
    for rows in hl.tile(m):
        out[rows] = torch.argmax(x[rows, :], dim=-1).to(torch.int32)
    return out


@helion.kernel(config=Config(block_sizes=[16, 128]))
def grpo_loss(
    logs: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: float = 0.2
) -> torch.Tensor:
    m, n = logs.shape
    out = torch.empty([m, n], dtype=torch.float32, device=logs.device)
    for rows, columns in hl.tile([m, n]):
        ratio = torch.exp(logs[rows, columns] - old[rows, columns])
        bounded = torch.clamp(ratio, 1 - clip, 1 + clip)
        gain = advantage[rows][:, None]
        out[rows, columns] = -torch.minimum(ratio * gain, bounded * gain)
    return out


@helion.kernel(config=Config(block_sizes=[32, 128, 128]))
def moe_matmul(x: torch.Tensor, experts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows sorted by expert, each expert's rows times its matrix; bounds read from a tensor."""
    rows_in, k = x.shape
    count, _, n = experts.shape
    out = torch.zeros([rows_in, n], dtype=torch.float32, device=x.device)
    for expert in hl.grid(count):
        for rows in hl.tile(offsets[expert], offsets[expert + 1]):
            for columns in hl.tile(n):
                acc = hl.zeros([rows, columns], dtype=torch.float32)
                for inner in hl.tile(k):
                    acc = torch.addmm(acc, x[rows, inner], experts[expert, inner, columns])
                out[rows, columns] = acc
    return out
