"""Derive the trainer's launch options from the configuration. Does not import torch."""

from rft_platform.config.schema import RftConfig
from rft_platform.training.launch import Rendezvous
from rft_platform.training.layout import Layout


def wanted_layout(config: RftConfig) -> Layout:
    """Return how models are placed and computed on the ranks."""
    settings = config.trainer
    return Layout(
        reduce_dtype=settings.reduce_dtype,
        cpu_offload=settings.cpu_offload,
        gradient_checkpointing=settings.gradient_checkpointing,
        compile=settings.torch_compile,
    )


def wanted_rendezvous(config: RftConfig) -> Rendezvous:
    """Return where the nodes meet. Without an endpoint the group has one node, whatever ``cluster.node_num`` is."""
    meeting = config.trainer.rendezvous
    if meeting.endpoint is None:
        return Rendezvous()
    return Rendezvous(config.cluster.node_num, meeting.endpoint, meeting.timeout_s)
