"""Measure docs/slow-networks.md: training between two hosts of two ranks that a slow network joins. Needs root.

    python -m tests.slow_networks --write
    python -m tests.slow_networks --links 100 --ways none int8

The hosts are network namespaces of this machine, and the token bucket of the kernel's traffic control (tc) lets so many
megabits per second through in each direction. All ways are trained with the same rows. A way that this version does not
have is left out. With --write the table of the page is that of this run, and `python docs/pictures.py` then draws the
picture. Nothing else must be running.
"""

import argparse
import json
import re
import sys

from .support.hosts_in_namespaces import two_hosts
from .support.jobs import ROOT

PAGE = ROOT / "docs" / "slow-networks.md"
# What each way is called on the page.
WAYS = {"none": "`DistributedOptimizer`", "bf16": "`Compression.bf16`", "int8": "`Compression.int8`",
        "hosts": '`LocalSGD(every=10, scope="hosts")`', "diloco": "`DiLoCo(every=50)`",
        "diloco int8": "`DiLoCo(every=50, compression=hvd.Compression.int8)`",
        "alone": "each rank alone, no network"}

Results = dict[int, dict[str, tuple[float, float]]]  # by the link, and then by the way: rows per second, and the loss


def measured(link: int, ways: list[str], steps: int, limit_s: float) -> dict[str, tuple[float, float]]:
    """What each way has come to over a link of so many megabits per second."""
    with two_hosts() as hosts:
        hosts.limit(link)
        job = hosts.run([2, 2], ["python", "tests/scripts/slow_training.py", str(steps), *ways], limit_s=limit_s)
    if job.code:
        sys.exit(job.output)
    lines = map(json.loads, re.findall(r'^\{"way".*\}$', job.output, re.M))
    return {line["way"]: (line["rows_per_s"], line["loss"]) for line in lines}


def table(results: Results) -> str:
    lines = ["| way | " + " | ".join(f"rows per second at {link} Mbit/s" for link in results) + " | loss |",
             "|---|" + "---|" * (len(results) + 1)]
    first = next(iter(results.values()))
    for way in (way for way in WAYS if way in first):
        fast = [f"{results[link][way][0]:,.0f}" for link in results]
        lines.append(f"| {WAYS[way]} | {' | '.join(fast)} | {first[way][1]:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.slow_networks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, nargs="+", default=[100, 1000], help="megabits per second")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY",
                        help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--steps", type=int, default=200, help="how many steps each way is trained")
    parser.add_argument("--limit", type=float, default=600, help="how many seconds a link may take")
    parser.add_argument("--write", action="store_true", help="write the table of the page")
    options = parser.parse_args()
    results = {link: measured(link, options.ways, options.steps, options.limit) for link in options.links}
    print(table(results))
    if options.write:
        marks = "<!-- results -->", "<!-- /results -->"
        before, _, rest = PAGE.read_text().partition(marks[0])
        PAGE.write_text(f"{before}{marks[0]}\n\n{table(results)}\n\n{marks[1]}{rest.partition(marks[1])[2]}")


if __name__ == "__main__":
    main()
