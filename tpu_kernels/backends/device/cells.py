"""LSTM and GRU cells: torch gives PrivateUse1 its fused GPU cells, which have no CPU kernel.

Shapes: gates are ``[batch, 4 * hidden]`` (LSTM: input, forget, cell, output) or ``[batch, 3 *
hidden]`` (GRU: reset, update, new), states ``[batch, hidden]``. The workspaces hold what the
backward needs and are private to the pair of functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels.backends.device.capsule import unwrap, wrap

Tensor = torch.Tensor


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else unwrap(tensor)


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(hy, cy, workspace)`` of ``aten::_thnn_fused_lstm_cell``."""
    gates = unwrap(input_gates) + unwrap(hidden_gates)
    for bias in (_cpu(input_bias), _cpu(hidden_bias)):
        if bias is not None:
            gates += bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * unwrap(cx) + i * g
    return wrap(o * cy.tanh()), wrap(cy), wrap(torch.cat((i, f, g, o), 1))


def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return ``(grad_gates, grad_cx, grad_bias)`` of the LSTM cell."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = unwrap(workspace).chunk(4, 1)
    tanh_cy = unwrap(cy).tanh()
    grad_h = torch.zeros_like(tanh_cy) if grad_hy is None else unwrap(grad_hy)
    grad_c = grad_h * o * (1 - tanh_cy * tanh_cy)
    if grad_cy is not None:
        grad_c = grad_c + unwrap(grad_cy)
    grad_gates = torch.cat(
        (
            grad_c * g * i * (1 - i),
            grad_c * unwrap(cx) * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_h * tanh_cy * o * (1 - o),
        ),
        1,
    )
    grad_bias = wrap(grad_gates.sum(0)) if has_bias else None
    return wrap(grad_gates), wrap(grad_c * f), grad_bias


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(hy, workspace)`` of ``aten::_thnn_fused_gru_cell``."""
    from_input, from_hidden, h = unwrap(input_gates), unwrap(hidden_gates), unwrap(hx)
    if input_bias is not None:
        from_input = from_input + unwrap(input_bias)
    if hidden_bias is not None:
        from_hidden = from_hidden + unwrap(hidden_bias)
    ir, iz, i_new = from_input.chunk(3, 1)
    hr, hz, hidden_new = from_hidden.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (i_new + r * hidden_new).tanh()
    workspace = torch.cat((r, z, new, h, hidden_new), 1)
    return wrap(new + z * (h - new)), wrap(workspace)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of input gates, hidden gates, hx and the two biases of the GRU cell."""
    grad = unwrap(grad_hy)
    r, z, new, h, hidden_new = unwrap(workspace).chunk(5, 1)
    grad_new = grad * (1 - z) * (1 - new * new)
    grad_z = grad * (h - new) * z * (1 - z)
    grad_r = grad_new * hidden_new * r * (1 - r)
    to_input = torch.cat((grad_r, grad_z, grad_new), 1)
    to_hidden = torch.cat((grad_r, grad_z, grad_new * r), 1)
    biases = (wrap(to_input.sum(0)), wrap(to_hidden.sum(0))) if has_bias else (None, None)
    return wrap(to_input), wrap(to_hidden), wrap(grad * z), *biases


CELLS: dict[str, Callable[..., Any]] = {
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
}
