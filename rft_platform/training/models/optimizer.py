"""AdamW: its learning-rate schedule, gradient clipping, and its moments on disk."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rft_platform.algorithms.spec import OptimizerSpec
from rft_platform.common.errors import UserError
from rft_platform.training.models.shards import ShardReader


def build_optimizer(
    model: nn.Module, spec: OptimizerSpec, moments_of: torch.optim.AdamW | None = None
) -> torch.optim.AdamW:
    """Build AdamW over the trainable parameters of ``model``. Weight decay applies to matrices only.

    If ``moments_of`` is given (an optimizer of the same model), its moments and step counts are kept. Raises
    RuntimeError if FSDP's modules show gathered copies instead of their shards.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        copies = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
        if copies:
            raise RuntimeError(f"parameters are gathered copies, expected FSDP's shards: {', '.join(copies[:5])}")
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(filled, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    if moments_of is not None:
        optimizer.state.update(moments_of.state)
    return optimizer


def check_schedule(spec: OptimizerSpec) -> None:
    """Raise UserError for a schedule that decays but has no end."""
    if spec.lr_scheduler_type == "constant":
        return
    first = spec.schedule_start + spec.lr_warmup_steps
    if spec.total_steps is None or spec.total_steps <= first:
        raise UserError(
            f"lr_scheduler_type {spec.lr_scheduler_type!r} decays from step {first} (start and warm-up) until "
            f"total_steps, which is {spec.total_steps}: set a later step, or use 'constant'"
        )


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Learning rate of the update from global optimiser step ``step`` to ``step + 1``.

    Warm-up is linear and reaches ``lr`` with its last step. The decay reaches 0 at ``total_steps``, one step after the
    last. The rate depends only on the step, so a resumed training needs no scheduler state.
    """
    done = step - spec.schedule_start
    if done < spec.lr_warmup_steps:
        return spec.lr * max(done + 1, 0) / spec.lr_warmup_steps
    if spec.lr_scheduler_type == "constant" or spec.total_steps is None:
        return spec.lr
    span = spec.total_steps - spec.schedule_start - spec.lr_warmup_steps
    share = min(max((done - spec.lr_warmup_steps) / span, 0.0), 1.0)
    return spec.lr * (1.0 - share if spec.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * share)))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients to a global 2-norm of at most ``max_norm`` over all ranks. Return the norm before scaling."""
    norm: Tensor = nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the global 2-norm of the gradients over all ranks; the gradients are not changed."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def apply_step(optimizer: torch.optim.AdamW, spec: OptimizerSpec, step: int) -> float:
    """Run one AdamW update at the learning rate of global step ``step``, drop the gradients, and return the rate."""
    rate = learning_rate(spec, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return rate


def moments(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return AdamW's moments and steps on this rank as ``<parameter>.<exp_avg, exp_avg_sq or step>``."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def restore_moments(model: nn.Module, optimizer: torch.optim.AdamW, folder: Path) -> None:
    """Read the result of ``moments`` from the shards in ``folder``, written by any number of ranks."""
    reader, into = ShardReader(folder), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and f"{name}.step" in reader.names:
            state = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = state
            into |= {f"{name}.{key}": value for key, value in state.items()}
    reader.read(into)
