"""What recipes of tiny agents with tools share.

- ``prepare``: ``prepare_tool_agent()`` writes model, tasks and configuration, with ``chat_template.jinja``;
  ``tool_calls()`` the messages of tool calls in a demonstration.
"""
