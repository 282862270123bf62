"""Extension of vLLM's worker processes: load weights from a folder, and end with the server.

vLLM mixes ``WorkerExtension`` into its worker class (``--worker-extension-cls``), so ``self`` is the worker.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rft_platform.cluster.this_process import end_with

#: Environment variable with the server's process id. It is also the process group of all processes that it started.
SERVER_PID = "RFT_VLLM_SERVER_PID"


class WorkerExtension:
    """Methods that the server calls on every worker (``collective_rpc``)."""

    def rft_load_weights(self, folder: str) -> None:
        """Load the full weights of ``folder``, whose names and shapes have been checked."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        with without_adapters(model):
            runner.reload_weights(weights_path=folder)
            pack_output_heads(model)
            check_finite(model)


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Replace the model's LoRA layers by their base layers while the block runs.

    vLLM's loader finds tensors by the names of the base layers. In some versions it does not look inside LoRA layers.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        if not isinstance(parent, BaseLayerWithLoRA)
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def check_finite(model: Any) -> None:
    """Raise ValueError if a weight is infinite or NaN: on a GPU vLLM would sample ids that do not exist, and die."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float32, torch.bfloat16, torch.float16) and not parameter.isfinite().all():
            raise ValueError(f"{name} has values that are not finite")


def pack_output_heads(model: Any) -> None:
    """Repeat the post-processing of embeddings and output heads, as after a first load.

    On a CPU vLLM computes with a packed copy of the weights. A reload loads no tensor for a head that is tied to the
    embedding, so it does not renew the head's copy, and the head would keep computing with the old weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and getattr(layer, "quant_method", None) is not None:
            layer.quant_method.process_weights_after_loading(layer)


# A server that is killed cannot end its engine processes, and these would hold the GPU's memory for ever.
end_with(int(os.environ.get(SERVER_PID, "0")))
