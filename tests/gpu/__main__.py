"""Run all parts of the checks, or the named parts, and print a summary. Exit code: 1 if a part failed, 2 if none ran.

    python -m tests.gpu [--into FILE] [must | may | NAME ...]

must: the parts that show whether the GPU path may be trusted, in five minutes. may: all other parts. The parts run one
after the other. All output is also appended to FILE, beginning with the GPU, its driver, and the versions of packages.
"""

import os
import subprocess
import sys

from .parts import PARTS, facts, look_at_machine, run_all, summary


def main(names: list[str]) -> int:
    if names[:1] == ["--into"]:
        tee = subprocess.Popen(["tee", "-a", names[1]], stdin=subprocess.PIPE)
        assert tee.stdin is not None
        for ours in (1, 2):
            os.dup2(tee.stdin.fileno(), ours)
        tee.stdin.close()
        names = names[2:]
    if names in (["must"], ["may"]):
        names = [part.name for part in PARTS if part.is_must == (names == ["must"])]
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are: {', '.join(part.name for part in PARTS)}")
    print("\n".join(facts()), flush=True)
    outcomes = run_all([part for part in PARTS if part.name in names or not names], look_at_machine())
    print("\n== summary\n" + summary(outcomes), flush=True)
    if not any(outcome.has_run for outcome in outcomes):
        return 2
    return int(any(outcome.has_failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
