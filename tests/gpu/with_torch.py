"""Checks tensors of torch: results in torch's default stream and in a second stream, and the memory of many calls.

    python -m tests.gpu.with_torch
"""

import importlib
from typing import Any

import mpistrat

torch: Any = importlib.import_module("torch")
ELEMENTS, CALLS = 10**6, 100


def reduced(value: float) -> Any:
    """Return the sum over all ranks of a tensor that the GPU computes late."""
    tensor = torch.full((ELEMENTS,), 0.0, device="cuda")
    for _ in range(50):
        tensor = tensor + value / 50
    return mpistrat.allreduce(tensor, op=mpistrat.Sum, name="torch")


def main() -> None:
    mpistrat.init()
    torch.cuda.set_device(mpistrat.local_rank() % torch.cuda.device_count())
    size = mpistrat.size()
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for number in range(1, 21):
                found = reduced(float(number)) * 2
                torch.testing.assert_close(found.cpu(), torch.full((ELEMENTS,), 2.0 * number * size))
    kept = []
    for _ in range(CALLS):
        reduced(1.0)
        kept.append(torch.cuda.mem_get_info()[0])
    lost = (kept[CALLS // 5] - kept[-1]) / 2**20
    print(f"torch {torch.__version__}: right in its default stream and in another one; the last {CALLS * 4 // 5} calls "
          f"took {lost:.0f} MiB more", flush=True)
    assert lost < 10 * ELEMENTS * 4 / 2**20, "each call takes memory"
    mpistrat.shutdown()


if __name__ == "__main__":
    main()
