"""``python -m rft_platform``: the same as ``rft``."""

from rft_platform.cli.main import main

if __name__ == "__main__":
    main()
