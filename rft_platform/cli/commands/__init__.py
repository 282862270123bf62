"""The subcommands of ``rft``, one file each; ``store`` and ``models`` have their own subcommands.

Each file defines a function with Typer options, which ``cli.main`` registers; its docstring is the help text.
- Run a project: ``demo``, ``run``, ``tune``, ``ui``, ``stop``.
- Look at results: ``rounds``, ``trace``, ``evaluate`` (``rft eval``), ``metrics``.
- Change stored results: ``judge``, ``store``, ``models``.
- Production traffic: ``online`` (``rft serve``, ``rft forget``), ``releases`` (subcommands of ``models``).
- Check an installation: ``doctor``.
"""
