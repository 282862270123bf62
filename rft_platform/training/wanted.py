"""What a configuration asks of the trainer group. No torch here."""

from rft_platform.config.schema import RftConfig
from rft_platform.training.launch import Rendezvous
from rft_platform.training.layout import Layout


def wanted_layout(config: RftConfig) -> Layout:
    """How models lie on the ranks."""
    settings = config.trainer
    return Layout(
        reduce_dtype=settings.reduce_dtype,
        cpu_offload=settings.cpu_offload,
        gradient_checkpointing=settings.gradient_checkpointing,
        compile=settings.torch_compile,
    )


def wanted_rendezvous(config: RftConfig) -> Rendezvous:
    """Where its nodes meet; without an endpoint one node trains, however many the cluster has."""
    meeting = config.trainer.rendezvous
    if meeting.endpoint is None:
        return Rendezvous()
    return Rendezvous(config.cluster.node_num, meeting.endpoint, meeting.timeout_s)
