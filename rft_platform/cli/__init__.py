"""The ``rft`` command: its subcommands and their shared code.

Read in this order:
- ``main``: the Typer application with all subcommands and the entry point.
- ``exits``: error messages and exit codes.
- ``commands``: one file per subcommand; each parses options and calls functions of other packages.
- ``round_policy``, ``round_table``, ``summary``, ``bench``, ``health``: shared lookups and output of the commands.
"""
