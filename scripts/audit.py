"""Ask the OSV database for known vulnerabilities of everything in the lock files; ``make audit`` runs this.

Exit status of ``python -m scripts.audit``: 0 when every locked package was looked up and none is vulnerable, 1 when one
is vulnerable, 3 when some could not be looked up, for example because the database cannot be reached from here: a
failure for CI too. make replaces 1 and 3 by 2.
OSV_URL selects another server with OSV's query API.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from scripts.lock import BESIDE, DEVELOPMENT, GPU, REPOSITORY, REQUIREMENTS, RUNTIME, TORCH, VLLM

OSV = "https://api.osv.dev/v1/query"
VULNERABLE, NOT_AUDITED = 1, 3
FILES = [
    *(RUNTIME, DEVELOPMENT, GPU, TORCH, VLLM),
    *(REQUIREMENTS / f"{name}.txt" for name in BESIDE),
    *sorted(REPOSITORY.glob("examples/*/lock*.txt")),
]


def main(files: list[Path]) -> int:
    """Audit each file and print what was found; the exit status."""
    results = [_audit(file) for file in files]
    if NOT_AUDITED in results:
        print("NOT AUDITED: some packages were not looked up. Run make audit where the database is reachable.")
    return VULNERABLE if VULNERABLE in results else max(results)


def _audit(file: Path) -> int:
    """Audit one requirements file; the exit status for it."""
    service = ["--vulnerability-service=osv", f"--osv-url={os.environ.get('OSV_URL', OSV)}"]
    options = ["--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off", *service]
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    name = file.relative_to(REPOSITORY) if file.is_relative_to(REPOSITORY) else file
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        reason = (done.stderr.strip().splitlines() or [f"pip-audit ended with exit status {done.returncode}"])[-1]
        print(f"{name}: not audited: {reason}")
        return NOT_AUDITED
    skipped = [package for package in packages if "skip_reason" in package]
    vulnerable = [package for package in packages if package.get("vulns")]
    found = f"{len(vulnerable)} vulnerable, {len(skipped)} skipped"
    print(f"{name}: {len(packages) - len(skipped)} packages looked up, {found}")
    for package in skipped:
        print(f"  {package['name']}: skipped: {package['skip_reason']}")
    for package in vulnerable:
        for advisory in package["vulns"]:
            fixed = ", ".join(advisory["fix_versions"]) or "no release yet"
            print(f"  {package['name']} {package['version']}: {advisory['id']}, fixed in {fixed}")
    if vulnerable:
        return VULNERABLE
    return NOT_AUDITED if skipped or not packages else 0


if __name__ == "__main__":
    sys.exit(main(FILES))
