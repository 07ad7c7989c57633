"""Train a small torch network on handwritten digits, averaging gradients by hand, on any number of ranks.

    python examples/torch_digits.py
    mpirun -np 2 python examples/torch_digits.py

mpistrat accepts torch tensors, on the CPU or on a GPU, and returns torch tensors.
"""

import argparse
import hashlib
import sys
import time

import numpy as np

import mpistrat

try:
    import torch
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error.name} is not installed: pip install torch scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
args = parser.parse_args()

mpistrat.init()
rank, size = mpistrat.rank(), mpistrat.size()
device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{mpistrat.local_rank() % torch.cuda.device_count()}"
    torch.cuda.set_device(device)

x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(x))  # The same split on every rank.
images = torch.tensor(x[order] / 16, dtype=torch.float32, device=device)
labels = torch.tensor(y[order], device=device)
train = mpistrat.shard(torch.arange(1437))  # This rank's images, as many as every other rank's.

torch.manual_seed(1 + rank)  # The ranks start with different weights; the broadcast makes them equal.
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
for name, parameter in model.named_parameters():
    parameter.data.copy_(mpistrat.broadcast(parameter.detach(), root_rank=0, name=name))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * size)

began = time.monotonic()
for epoch in range(args.epochs):
    total = torch.zeros((), device=device)
    for batch in train[torch.randperm(len(train))].split(args.batch_size):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient, average in zip(gradients, mpistrat.grouped_allreduce(gradients, name="gradients")):
            gradient.copy_(average)
        optimizer.step()
        total += loss.detach() * len(batch) / len(train)
    mean = mpistrat.allreduce(total, name="loss").item()
    if rank == 0:
        print(f"epoch {epoch + 1}/{args.epochs}: loss {mean:.4f}", flush=True)
seconds = time.monotonic() - began

weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
digests = mpistrat.allgather_object(hashlib.sha256(weights).hexdigest())
if len(set(digests)) > 1:
    sys.exit(f"The ranks have ended with different weights: {digests}")
if rank == 0:
    accuracy = (model(images[1437:]).argmax(dim=1) == labels[1437:]).float().mean().item()
    print(f"test accuracy {accuracy:.3f}, {seconds:.1f} s, weights {digests[0]}, the same on all ranks ({size})")
