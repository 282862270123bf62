"""The subcommands of ``rft``; ``store``, ``models`` and ``debug`` have their own subcommands.

Each file defines a function with Typer options, which ``cli.main`` registers; its docstring is the help text.
- Run a project: ``demo``, ``run``, ``tune``, ``servers`` (``rft ui``, ``view``, ``metrics``, ``stop``).
- Look at results: ``rounds``, ``trace``, ``evaluate`` (``rft eval``). Search for a prompt: ``prompt``.
- Change stored results: ``judge``, ``store``, ``models``.
- Traces of other tools: ``imports`` (``rft import``, ``rft receive``).
- Production traffic: ``online`` (``rft serve``, ``rft forget``).
- Try parts without a project: ``debug``. Understand and convert configurations: ``config``.
- Check an installation: ``doctor``.
"""
