"""Write the rows of a folder of Harbor tasks: ``python rows.py tasks > tasks.jsonl``.

Tasks that need a container are named on stderr, with the reason, and left out.
"""

import json
import sys
from pathlib import Path

from task_folder import HarborTask, NeedsContainerError

if __name__ == "__main__":
    for file in sorted(Path(sys.argv[1]).glob("*/task.toml")):
        try:
            task = HarborTask.read(file.parent)
        except NeedsContainerError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        print(json.dumps({"question": task.instruction, "task": file.parent.name}))
