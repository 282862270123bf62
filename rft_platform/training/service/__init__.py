"""The trainer group as a service: its client, its processes, and the connection between them.

``TrainerClient`` (``trainer_client``) finds a running group by its lease or starts one, sends commands and receives
events. ``worker`` is the process of one rank; rank 0 serves the commands over HTTP (``CommandServer`` of
``command_server``) and broadcasts them to the other ranks. Clients do not import torch.

Read in this order: ``command_server``, ``worker``, ``trainer_client``.
"""
