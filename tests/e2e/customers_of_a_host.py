"""Customers in the network of a serving host: a process that talks until a version answers, then prints its tally."""

import json
import sys
import time

from tests.support.recipe_projects import modules_of

(customers_of,) = modules_of("front-desk", "customers")


def main(url: str, versions: int, limit_s: float) -> None:
    """Talk until answers of ``versions`` trained versions arrived, or the time is over."""
    customers = customers_of.Customers(url, customers_of.Habits(seed=1))
    deadline = time.monotonic() + limit_s
    while len(customers.tally.right) <= versions and time.monotonic() < deadline:
        time.sleep(0.5)
    customers.stop()
    tally = customers.tally
    answers = {version: len(right) for version, right in tally.right.items()}
    print(json.dumps({"answers": answers, "failures": tally.failures, "rated": tally.rated}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
