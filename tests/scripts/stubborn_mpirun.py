"""In the place of mpirun: starts one rank, says which signals it gets, and ends with the rank, or never.

    stubborn_mpirun.py ends|stays COMMAND...
"""

import os
import signal
import subprocess
import sys

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGURG, signal.SIGCONT):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, _: os.write(1, f"got {signal.Signals(number).name}\n".encode()))
way, *command = sys.argv[1:]
rank = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": str(os.getpid())}
code = subprocess.run(command, env={**os.environ, **rank}).returncode
os.write(1, b"the rank has ended\n")
if way == "ends":
    sys.exit(code)
while True:
    signal.pause()
