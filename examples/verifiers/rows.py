"""Write the rows of a taskset: ``.venv/bin/python rows.py arithmetic --args '{"size": 48}' > arithmetic.jsonl``.

A row has the position of a task in its taskset, its key, and its prompt for people who look at runs.
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

import verifiers.v1 as vf

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("taskset", help="the id of an installed taskset, or a module of this folder")
    parser.add_argument("--args", type=json.loads, default={}, help="fields of the taskset's configuration, as JSON")
    parser.add_argument("--skip", type=int, default=0, help="tasks to leave out, for held-out rows")
    parser.add_argument("--limit", type=int, default=None, help="number of rows; an infinite taskset needs it")
    given = parser.parse_args()
    sys.path.append(str(Path(__file__).parent))
    config = vf.taskset_config_type(given.taskset).model_validate({"id": given.taskset, **given.args})
    for task in islice(vf.load_taskset(config).skip(given.skip), given.limit):
        print(json.dumps({"question": task.data.prompt_text, "idx": task.data.idx, "key": task.key}))
