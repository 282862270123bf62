"""Write the rows of a folder of Harbor tasks: ``python rows.py tasks > tasks.jsonl``.

Tasks that need a container are named on stderr, with the reason, and left out.
"""

import argparse
import json
import sys
from pathlib import Path

from task_folder import HarborTask, NeedsContainerError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder of task folders")
    for file in sorted(parser.parse_args().folder.glob("*/task.toml")):
        try:
            task = HarborTask.read(file.parent)
        except NeedsContainerError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        print(json.dumps({"question": task.instruction, "task": file.parent.name}))
