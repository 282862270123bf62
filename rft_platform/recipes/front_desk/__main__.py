"""``python -m rft_platform.recipes.front_desk``: the online demo; ``make demo-online`` runs it."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rft_platform.common.errors import RftError
from rft_platform.config.home import Home
from rft_platform.recipes.front_desk.run import Goal, move_aside, run

_HOME = ".rft-online"


def main() -> int:
    """Run the demo in ``RFT_HOME``, by default ``.rft-online``; exit status 1 if it misses its goal."""
    parser = argparse.ArgumentParser(prog="python -m rft_platform.recipes.front_desk", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, training and customers (default 1)")
    parser.add_argument("--goal", type=float, default=0.8, help="success rate at which the demo ends (default 0.8)")
    parser.add_argument("--minutes", type=float, default=9.0, help="longest time in minutes (default 9)")
    parser.add_argument("--fresh", action="store_true", help="rename the folder of an earlier demo and start a new one")
    parser.add_argument("--json", type=Path, help="also write the outcome to this file")
    given = parser.parse_args()
    os.environ.setdefault("RFT_HOME", str(Path(_HOME).absolute()))
    try:
        home, goal = Home.from_environment(), Goal(given.goal, given.minutes * 60)
        if given.fresh and (moved := move_aside(home)):
            print(f"the earlier demo is now in {moved}", flush=True)
        outcome = run(home, given.seed, goal, lambda line: print(line, flush=True))
    except RftError as error:
        print(error, file=sys.stderr)
        return 2
    print(outcome.line())
    for failure in outcome.failures[:5]:
        print(f"failed request: {failure}")
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(outcome)))
    return 0 if outcome.after >= given.goal and not outcome.failures else 1


if __name__ == "__main__":
    sys.exit(main())
