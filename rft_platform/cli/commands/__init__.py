"""The subcommands of ``rft``: options, and calls of plain functions."""
