"""Train a small ResNet with PyTorch's convolutions and the catalog's, eager and compiled; compare losses and speed.

Equal models read the same batches of generated images in channels_last, and take turns, so that other work on the
machine affects all alike. It needs PyTorch: pip install '.[torch]' in the checkout.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from catalog.torch import conv2d

CLASSES = 10
SIZE = 32
NOISE = 0.5
ROWS = 10
APART = 0.02  # losses of equal models that differ by more are not explained by rounding

Function = Callable[..., torch.Tensor]


class Conv(nn.Conv2d):
    """PyTorch's module, computed by a function of one's own."""

    def __init__(self, function: Function, c: int, k: int, extent: int, stride: int = 1) -> None:
        super().__init__(c, k, extent, stride, extent // 2, bias=False)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, c, h, w) to (n, k, out h, out w)."""
        return self.function(x, self.weight, None, self.stride, self.padding)


class Block(nn.Module):
    """Two convolutions of 3 x 3, added to what came in, which a third one projects where its shape differs."""

    def __init__(self, function: Function, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = Conv(function, c, k, 3, stride), nn.BatchNorm2d(k)
        self.conv2, self.norm2 = Conv(function, k, k, 3), nn.BatchNorm2d(k)
        self.project = nn.Identity() if (c, stride) == (k, 1) else Conv(function, c, k, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, c, h, w) to (n, k, h / stride, w / stride)."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.project(x))


class Training:
    """A model with its optimizer, its losses and the seconds of its steps."""

    def __init__(self, function: Function, seed: int, backend: str = "") -> None:
        torch.manual_seed(seed)  # the same weights for every model
        blocks = [Block(function, c, k, stride) for c, k, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))]
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
        self.model = nn.Sequential(Conv(function, 3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), *blocks, *head)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in PyTorch's hints
        self.run: Function = torch.compile(self.model, fullgraph=True, backend=backend) if backend else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on one batch."""
        start = time.perf_counter()
        loss = functional.cross_entropy(self.run(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 100), ("batch", 32), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="inductor", help="what torch.compile uses; aot_eager compiles no code")
    asked = parser.parse_args()

    trainings = {
        "PyTorch's": Training(functional.conv2d, asked.seed),
        "the catalog's": Training(conv2d, asked.seed),
        "compiled": Training(conv2d, asked.seed, asked.backend),
    }
    generator = torch.Generator().manual_seed(asked.seed)
    patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=generator)  # an image is its class's, under noise
    print("step" + "".join(f"{name:>15}" for name in trainings) + "     apart")
    apart = 0.0
    for step in range(asked.steps):
        labels = torch.randint(CLASSES, (asked.batch,), generator=generator)
        noise = torch.randn(asked.batch, 3, SIZE, SIZE, generator=generator)
        images = (patterns[labels] + NOISE * noise).contiguous(memory_format=torch.channels_last)
        for training in trainings.values():
            training.step(images, labels)
        losses = [training.losses[-1] for training in trainings.values()]
        apart = max(apart, max(losses) - min(losses))
        if step % max(1, asked.steps // ROWS) == 0 or step == asked.steps - 1:
            print(f"{step:4}" + "".join(f"{loss:15.5f}" for loss in losses) + f"   {apart:.1e}", flush=True)

    for name, training in trainings.items():
        timed = sorted(training.seconds[1:] or training.seconds)  # the first step compiles kernels
        print(f"{name:13}  {1e3 * timed[len(timed) // 2]:7.1f} ms a step")
    print(f"The losses are never more than {apart:.1e} apart.")
    assert apart < APART, "the losses disagree"


if __name__ == "__main__":
    main()
