"""Check the shipped Prometheus rules, their tests and the configuration with Prometheus's own tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks.figures import Effort

SHIPPED = Path(__file__).parents[2] / "deploy" / "monitoring"
ASKED = (
    ("check", "rules", "alerts.yaml"),
    ("check", "config", "prometheus.yml"),
    ("test", "rules", "alerts_test.yaml"),
)


def promtool(effort: Effort) -> dict[str, object]:
    """Run promtool; raises SystemExit if it is not installed."""
    if (program := shutil.which("promtool")) is None:
        raise SystemExit("promtool is not installed: apt-get install prometheus")
    found = []
    for arguments in ASKED:
        done = subprocess.run([program, *arguments], cwd=SHIPPED, capture_output=True, text=True)
        found.append(done.returncode == 0)
        effort.say(f"promtool {' '.join(arguments)}: {'passed' if found[-1] else done.stdout + done.stderr}")
    return {"promtool": all(found)}
