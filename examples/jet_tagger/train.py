"""Train the jet tagger on generated jets and write its weights.

    python -m examples.jet_tagger.train

It takes about two minutes on two cores. examples/README.md gives the accuracy of the committed
weights. The seeds are fixed, but other CPUs or torch versions round differently.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.jet_tagger import generate
from examples.jet_tagger.model import JetTagger

WEIGHTS = Path(__file__).with_name("weights.safetensors")


def tensors(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Generated jets as (particles (n, 4, 16), jet (n, 3), labels (n,))."""
    columns, labels = generate.jets(n, seed)
    particles = torch.stack(
        [torch.from_numpy(columns[f"part_{name}"]) for name in ("pt", "energy", "deta", "dphi")], 1
    )
    jet = torch.stack([torch.from_numpy(columns[name]) for name in ("pt", "eta", "mass")], 1)
    return particles, jet, torch.from_numpy(labels)


def accuracy(model: JetTagger, particles: Tensor, jet: Tensor, labels: Tensor) -> float:
    """The share of jets whose most probable class is the right one."""
    with torch.no_grad():
        _, label = model(particles, jet)
    return float((label == labels).float().mean())


def train(n: int, epochs: int, seed: int, batch: int = 512, tried: int = 10_000) -> JetTagger:
    """Train on `n` jets; after each epoch, print the accuracy on `tried` others."""
    torch.manual_seed(seed)
    particles, jet, labels = tensors(n, seed)
    fresh = tensors(tried, seed + 1)
    model = JetTagger()
    steps = epochs * (n // batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3.0e-3, weight_decay=1.0e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6.0e-3, total_steps=steps)
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(n)[: n // batch * batch].reshape(-1, batch):
            loss = loss_of(model.logits(particles[rows], jet[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        mean = total / (n // batch)
        print(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {accuracy(model, *fresh):.4f}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jets", type=int, default=80_000)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()

    from safetensors.torch import save_file

    model = train(options.jets, options.epochs, options.seed).eval()
    print(f"accuracy on 20000 fresh jets: {accuracy(model, *tensors(20_000, 77)):.4f}")
    save_file(model.state_dict(), options.output)
    print(f"wrote {options.output} ({options.output.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
