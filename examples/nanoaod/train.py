"""Train the flavour tagger on the NanoAOD file and write its weights.

    python -m examples.nanoaod.train

It takes seconds. With 6 b jets among 537, this is no useful tagger; it shows how to use a real
file. The area under the ROC curve from cross-validation is printed (random choice: 0.5).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from examples.nanoaod import data
from examples.nanoaod.model import INPUTS, FlavourTagger

WEIGHTS = Path(__file__).with_name("weights.safetensors")


def tensors(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """The file's jets as (inputs (n, 12) float32, labels (n,), entries (n,))."""
    columns, labels = data.jets(path)
    inputs = np.stack([columns[name].astype(np.float32) for name in INPUTS], 1)
    return torch.from_numpy(inputs), torch.from_numpy(labels), torch.from_numpy(columns["entry"])


def train(inputs: Tensor, labels: Tensor, seed: int, steps: int = 150) -> FlavourTagger:
    """A tagger fitted to jets, all of them in each step."""
    torch.manual_seed(seed)
    model = FlavourTagger()
    features = model.features(inputs)
    model.mean.copy_(features.mean(0))
    model.scale.copy_(1.0 / features.std(0).clamp(min=1.0e-3))
    # Weights of flavours are 1 / sqrt(count): with 1 / count, 6 jets would dominate the fit.
    weight = torch.bincount(labels, minlength=3).clamp(min=1).float().rsqrt()
    loss_of = nn.CrossEntropyLoss(weight=weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0e-2, weight_decay=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model.logits(inputs), labels).backward()
        optimizer.step()
    return model.eval()


def area_under_roc(score: Tensor, positive: Tensor) -> float:
    """The probability that a positive scores above a negative; ties count half."""
    difference = score[positive].unsqueeze(1) - score[~positive].unsqueeze(0)
    return float((difference > 0).float().mean() + 0.5 * (difference == 0).float().mean())


def cross_validate(inputs: Tensor, labels: Tensor, entries: Tensor, seed: int) -> Tensor:
    """Probabilities (n, 3) of every jet, from a model that was not trained on jets of its event."""
    probabilities = torch.empty(len(labels), 3)
    for fold in range(5):
        held_out = entries % 5 == fold
        model = train(inputs[~held_out], labels[~held_out], seed)
        with torch.no_grad():
            probabilities[held_out] = model(inputs[held_out])
    return probabilities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()

    from safetensors.torch import save_file

    inputs, labels, entries = tensors(data.locate())
    probabilities = cross_validate(inputs, labels, entries, options.seed)
    counts = (f"{int((labels == i).sum())} {name}" for i, name in enumerate(data.CLASSES))
    print(f"{len(labels)} jets; {', '.join(counts)}")
    print("area under the ROC curve, 5-fold cross-validation by event:")
    print(f"  c or b against light: {area_under_roc(1 - probabilities[:, 0], labels > 0):.3f}")
    print(f"  b against the rest:   {area_under_roc(probabilities[:, 2], labels == 2):.3f}")
    model = train(inputs, labels, options.seed)
    save_file(model.state_dict(), options.output)
    print(f"wrote {options.output} ({options.output.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
