"""Compare the sum in /app/total.txt with that of the numbers."""

import json
from pathlib import Path

file = Path("/app/total.txt")
found = file.read_text().split() if file.is_file() else []
expected = sum(int(line) for line in Path("/app/data/numbers.txt").read_text().split())
scores = {"reward": float(found == [str(expected)]), "written": float(file.is_file())}
Path("/logs/verifier/reward.json").write_text(json.dumps(scores))
