"""``python -m rft_platform.recipes.calculator FOLDER`` writes a tiny model, tasks, demonstrations and ``rft.yaml``."""

import argparse
from pathlib import Path

from rft_platform.recipes.calculator.prepare import prepare


def main() -> None:
    """Write model, tasks, demonstrations and configuration into the folder that the command's argument names."""
    parser = argparse.ArgumentParser(prog="python -m rft_platform.recipes.calculator", description=__doc__)
    parser.add_argument("folder", type=Path, help="where model/, tasks/ and rft.yaml go")
    print(prepare(parser.parse_args().folder))


if __name__ == "__main__":
    main()
