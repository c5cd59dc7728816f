"""One way of training every model of the zoo, on the CPU and on the device in its modes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tpu_kernels.device  # noqa: F401 - before the first backward, which counts the devices
from tests.zoo import language, others
from tpu_kernels.backends.device.modes import DEFERRED, set_eager_mode

MODELS = {**language.MODELS, **others.MODELS}


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a model is run.

    Attributes:
        device: Where.
        wrap: Makes of the model what is called.
        scope: What is in force while it is trained.
    """

    device: str
    wrap: Callable[[nn.Module], Any] = lambda model: model
    scope: Callable[[], Any] = contextlib.nullcontext


CPU = Mode("cpu")
MODES = {
    "strict": Mode("tpu"),
    "deferred": Mode("tpu", scope=lambda: set_eager_mode(DEFERRED)),
    "compiled": Mode("tpu", lambda model: torch.compile(model, backend="tpu")),
}


@dataclasses.dataclass
class Trained:
    """What training left.

    Attributes:
        losses: The loss of each step.
        gradients: By parameter, of the first step.
        state: The state at the end.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def train(name: str, mode: Mode, steps: int = 2) -> Trained:
    """Forward, backward and AdamW steps of a model, from a fixed start."""
    make, data = MODELS[name]
    torch.manual_seed(0)
    model = make().to(mode.device)
    if hasattr(model, "tie_weights"):  # `to` has made two of a parameter with two names
        model.tie_weights()
    batch = {key: value.to(mode.device) for key, value in data().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = mode.wrap(model)
    found = Trained([], {}, {})
    with mode.scope():
        for step in range(steps):
            optimizer.zero_grad()
            result = call(**batch)
            loss = result if isinstance(result, Tensor) else result.loss
            loss.backward()
            if step == 0:
                found.gradients = {
                    key: p.grad.cpu().clone()
                    for key, p in model.named_parameters()
                    if p.grad is not None
                }
            optimizer.step()
            found.losses.append(loss.item())
    found.state = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
    return found


def difference(found: Trained, expected: Trained) -> str | None:
    """What of a training differs from another beyond rounding, None if nothing does.

    The same float32 arithmetic in another order: losses and gradients agree to some 1e-6 of their
    largest element, with room for reductions over a batch. AdamW divides a gradient by its own
    size, which makes a fraction of the learning rate (1e-3) of the last bits of small ones.
    """
    for a, b in zip(found.losses, expected.losses, strict=True):
        if not abs(a - b) <= 1e-4 * max(abs(b), 1.0):
            return f"losses {found.losses} instead of {expected.losses}"
    if found.gradients.keys() != expected.gradients.keys():
        return f"gradients of {sorted(found.gradients.keys() ^ expected.gradients.keys())}"
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    for key, gradient in expected.gradients.items():
        bound = 1e-4 * float(gradient.abs().max()) + 1e-6 * largest
        apart = float((found.gradients[key] - gradient).abs().max())
        if not apart <= bound:
            return f"the gradient of {key} is {apart:.2g} off, of {float(gradient.abs().max()):.2g}"
    for key, value in expected.state.items():
        apart = float((found.state[key].double() - value.double()).abs().max())
        if not apart <= 2.5e-3:  # two steps
            return f"{key} is {apart:.2g} off after the steps"
    return None
