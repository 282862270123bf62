"""``python -m rft_platform.recipes.arithmetic FOLDER`` writes the demo's tiny model, tasks and configuration."""

import argparse
from pathlib import Path

from rft_platform.recipes.arithmetic.prepare import prepare


def main() -> None:
    """Write model, tasks and configuration into the folder that the command's argument names."""
    parser = argparse.ArgumentParser(prog="python -m rft_platform.recipes.arithmetic", description=__doc__)
    parser.add_argument("folder", type=Path, help="where model/, tasks/ and rft.yaml go")
    print(prepare(parser.parse_args().folder))


if __name__ == "__main__":
    main()
