"""The ``rft`` command: its subcommands (``commands``) and what they share."""
