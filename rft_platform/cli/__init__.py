"""The ``rft`` command: its subcommands and what they print.

Read in this order:
- ``main``: the Typer application with all subcommands and the entry point.
- ``exits``: error messages and exit codes.
- ``commands``: one file per subcommand; each parses options and calls functions of other packages.
- ``views``: look-ups and output that several commands use.
"""
