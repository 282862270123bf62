"""``python -m rft_platform.recipes.calculator FOLDER``: tiny model, word problems, demonstrations and configuration."""

import argparse
from pathlib import Path

from rft_platform.recipes.calculator.prepare import prepare


def main() -> None:
    """Write everything into the folder that the argument names."""
    parser = argparse.ArgumentParser(prog="python -m rft_platform.recipes.calculator", description=__doc__)
    parser.add_argument("folder", type=Path, help="where model/, tasks/ and rft.yaml go")
    print(prepare(parser.parse_args().folder))


if __name__ == "__main__":
    main()
