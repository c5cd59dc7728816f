"""``torch.autocast("tpu")``: low precision and float32 for the same operators as elsewhere.

torch's C++ autocast has lists per device and none for this one. The lists below follow its generic
policies; operators on neither list run in the dtypes that they are given, operators on the third in
the widest dtype of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from tpu_kernels._compat_torch import exclude_keys, key_set
from tpu_kernels.backends.device.handlers import find_operator

KEY = "AutocastPrivateUse1"

_LOW_PRECISION = """
_convolution conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc
conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv
addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
scaled_dot_product_attention
"""

_FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim norm.Scalar norm.ScalarOpt_dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits cross_entropy_loss dist pdist cdist renorm logsumexp
softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList prod prod.dim_int
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_trilinear3d upsample_bicubic2d
"""

_WIDEST = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat
stack
"""

_KEYS = key_set(KEY)
_NARROW = (torch.float16, torch.bfloat16)


def register() -> list[torch.library.Library]:
    """Register autocast for the simulated device.

    Returns:
        The libraries that hold the registrations; they must outlive the device.
    """
    # Without this, every operator without an autocast kernel is an error inside the context.
    fallthrough = torch.library.Library("_", "IMPL")
    fallthrough.fallback(torch.library.fallthrough_kernel, KEY)
    library = torch.library.Library("aten", "IMPL")
    for names, dtype_of in (
        (_LOW_PRECISION, _low_precision),
        (_FLOAT32, _float32),
        (_WIDEST, _widest),
    ):
        for name in names.split():
            operator = find_operator(f"aten::{name}")
            if operator is not None:
                library.impl(name, _kernel(operator, dtype_of), KEY)
    return [fallthrough, library]


def _kernel(
    operator: OpOverload, dtype_of: Callable[[Iterable[Any]], torch.dtype]
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of((args, kwargs.values()))

        def cast(value: Any) -> Any:
            return value.to(dtype) if _castable(value) and value.dtype is not dtype else value

        with exclude_keys(_KEYS):
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def _castable(value: Any) -> bool:
    # As in C++: floating-point tensors of this device, and never float64.
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == "tpu"
    )


def _low_precision(arguments: Iterable[Any]) -> torch.dtype:
    return torch.get_autocast_dtype("tpu")


def _float32(arguments: Iterable[Any]) -> torch.dtype:
    return torch.float32


def _widest(arguments: Iterable[Any]) -> torch.dtype:
    found = [x.dtype for x in torch.utils._pytree.tree_leaves(list(map(list, arguments)))
             if _castable(x)]  # fmt: skip
    low = torch.get_autocast_dtype("tpu")
    return torch.float32 if any(d not in _NARROW for d in found) else low
