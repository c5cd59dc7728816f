"""Helion kernels of the kinds that Helion's own examples cover, written for the tests."""

from __future__ import annotations

import math

import helion
import helion.language as hl
import torch

Config = helion.Config


@helion.kernel(config=Config(block_sizes=[32, 128]))
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.shape):
        out[tile] = x[tile] + y[tile]
    return out


@helion.kernel()
def exp(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.shape):
        out[tile] = torch.exp(x[tile])
    return out


@helion.kernel(config=Config(block_sizes=[32]))
def softmax(x: torch.Tensor) -> torch.Tensor:
    n, _ = x.shape
    out = torch.empty_like(x)
    for tile in hl.tile(n):
        row = x[tile, :].to(torch.float32)
        shifted = torch.exp(row - torch.amax(row, dim=1, keepdim=True))
        out[tile, :] = (shifted / torch.sum(shifted, dim=1, keepdim=True)).to(x.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[32]))
def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    m, _ = x.shape
    out = torch.empty_like(x)
    total = torch.empty_like(x)
    for tile in hl.tile(m):
        summed = x[tile, :].to(torch.float32) + residual[tile, :].to(torch.float32)
        mean = torch.mean(summed * summed, dim=-1, keepdim=True)
        total[tile, :] = summed.to(x.dtype)
        scaled = summed * torch.rsqrt(mean + eps) * weight[:].to(torch.float32)
        out[tile, :] = scaled.to(x.dtype)
    return out, total


@helion.kernel(config=Config(block_sizes=[64, 128, 128]))
def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m, k = x.shape
    _, n = y.shape
    out = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for tile_m, tile_n in hl.tile([m, n]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            acc = torch.addmm(acc, x[tile_m, tile_k], y[tile_k, tile_n])
        out[tile_m, tile_n] = acc.to(x.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[64, 128, 128]))
def matmul_of_transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Host code that transposes, slices and casts: what a replay in JAX gets wrong."""
    yt = y.t()[:, 128:].to(x.dtype)
    m, k = x.shape
    n = yt.size(1)
    out = torch.zeros([m, n], dtype=torch.float32, device=x.device)
    for tile_m, tile_n in hl.tile([m, n]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            acc = torch.addmm(acc, x[tile_m, tile_k], yt[tile_k, tile_n])
        out[tile_m, tile_n] = acc
    return out.sum(0).to(x.dtype)


@helion.kernel(config=Config(block_sizes=[1, 64, 64]))
def attention(q_in: torch.Tensor, k_in: torch.Tensor, v_in: torch.Tensor) -> torch.Tensor:
    m_dim = q_in.size(-2)
    n_dim = k_in.size(-2)
    head_dim = hl.specialize(q_in.size(-1))
    q_view = q_in.reshape([-1, m_dim, head_dim])
    v_view = v_in.reshape([-1, n_dim, head_dim])
    k_view = k_in.reshape([-1, n_dim, head_dim]).transpose(1, 2)
    out = torch.empty_like(q_view)
    scale = 1.0 / math.sqrt(head_dim)
    for tile_b, tile_m in hl.tile([q_view.size(0), m_dim]):
        m_i = hl.full([tile_b, tile_m], float("-inf"), dtype=torch.float32)
        l_i = torch.full_like(m_i, 1.0)
        acc = hl.zeros([tile_b, tile_m, head_dim], dtype=torch.float32)
        q = q_view[tile_b, tile_m, :]
        for tile_n in hl.tile(v_view.size(1)):
            k = k_view[tile_b, :, tile_n]
            scores = torch.bmm(q, k) * scale
            m_ij = torch.maximum(m_i, torch.amax(scores, -1))
            p = torch.exp(scores - m_ij[:, :, None])
            alpha = torch.exp(m_i - m_ij)
            l_i = l_i * alpha + torch.sum(p, -1)
            acc = acc * alpha[:, :, None]
            v = v_view[tile_b, tile_n, :]
            acc = torch.baddbmm(acc, p.to(v.dtype), v)
            m_i = m_ij
        acc = acc / l_i[:, :, None]
        out[tile_b, tile_m, :] = acc.to(out.dtype)
    return out.view(q_in.size())


@helion.kernel(config=Config(block_sizes=[32, 128]))
def scale_in_place(x: torch.Tensor, factor: float) -> None:
    for tile in hl.tile(x.shape):
        x[tile] = x[tile] * factor


@helion.kernel(config=Config(block_sizes=[32, 128]))
def biased(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile_m, tile_n in hl.tile(x.shape):
        value = x[tile_m, tile_n]
        if bias is not None:
            value = value + bias[tile_n][None, :]
        out[tile_m, tile_n] = value
    return out


@helion.kernel(config=Config(block_sizes=[32, 128]))
def sum_of_pair(xs: list[torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(xs[0])
    for tile in hl.tile(out.shape):
        out[tile] = xs[0][tile] + xs[1][tile]
    return out


@helion.kernel(config=Config(block_sizes=[32, 128]))
def leaky(x: torch.Tensor, slope: hl.constexpr) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.shape):
        value = x[tile]
        out[tile] = torch.where(value > 0, value, value * slope)
    return out


@helion.kernel(config=Config(block_sizes=[32, 128]))
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(gate)
    for tile in hl.tile(gate.shape):
        wide = gate[tile].to(torch.float32)
        out[tile] = (wide * torch.sigmoid(wide)).to(gate.dtype) * up[tile]
    return out


@helion.kernel(config=Config(block_sizes=[32]))
def row_sum(x: torch.Tensor) -> torch.Tensor:
    m, _ = x.shape
    out = torch.empty([m], dtype=x.dtype, device=x.device)
    for tile in hl.tile(m):
        out[tile] = x[tile, :].to(torch.float32).sum(-1).to(x.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[32]))
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    m, _ = x.shape
    out = torch.empty_like(x)
    for tile in hl.tile(m):
        row = x[tile, :].to(torch.float32)
        mean = torch.mean(row, dim=-1, keepdim=True)
        centred = row - mean
        variance = torch.mean(centred * centred, dim=-1, keepdim=True)
        scaled = centred * torch.rsqrt(variance + eps)
        out[tile, :] = (scaled * weight[:] + bias[:]).to(x.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[1, 64, 64, 64]))
def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    batch, m, k = a.shape
    n = b.size(2)
    out = torch.empty([batch, m, n], dtype=a.dtype, device=a.device)
    for tile_b, tile_m, tile_n in hl.tile([batch, m, n]):
        acc = hl.zeros([tile_b, tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            acc = torch.baddbmm(acc, a[tile_b, tile_m, tile_k], b[tile_b, tile_k, tile_n])
        out[tile_b, tile_m, tile_n] = acc.to(a.dtype)
    return out


@helion.kernel(config=Config(block_sizes=[64, 128, 128]))
def broken(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.shape):
        out[tile] = x[tile].no_such_method()
    return out


@helion.kernel(config=Config(block_sizes=[32, 128]))
def writes_and_returns(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.shape):
        x[tile] = x[tile] * 2
        out[tile] = x[tile] + 1
    return out
