"""Environments: episodes that a policy plays turn by turn. The workflow ``environment`` drives them.

Read in this order:

- ``interface``: ``Environment``, ``Turn`` and ``ToolCall``: what every environment provides.
- ``gymnasium_env``: environments of the package Gymnasium, as text.
- ``openenv_client``: a client of OpenEnv servers.
- ``scienceworld_env``: tasks of the package ScienceWorld.
- ``mcp_tools``: the tools of an MCP server.

``make_environment()`` in ``rollout.workflows.environment`` makes one by its name in a configuration.
"""
