"""The network between two hosts is cut for good by rank 0; then a rank of each host fails."""

import subprocess
import sys
import time
from pathlib import Path

import mpistrat

mark, = sys.argv[1:]
mpistrat.init()
mpistrat.barrier()
if mpistrat.rank() == 0:
    subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
    Path(mark).touch()
while not Path(mark).exists():
    time.sleep(0.05)
raise RuntimeError("failed on purpose")
