"""The ``rft`` command: one subcommand a file, thin over plain functions."""
