"""``python -m rft_platform``: same as the command ``rft``."""

from rft_platform.cli.main import main

if __name__ == "__main__":
    main()
