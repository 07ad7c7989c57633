"""Run all parts and print one summary. Ends with 1 if a part has failed."""

import sys

from .parts import PARTS, look_at_machine, run_all, summary


def main() -> int:
    """Run it."""
    outcomes = run_all(PARTS, look_at_machine())
    print("\n== summary\n" + summary(outcomes), flush=True)
    return int(any(outcome.has_failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
