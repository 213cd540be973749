"""Train a GPT of three million parameters with PyTorch's attention and with the catalog's; compare losses and speed.

Two equal models read the same batches of this repository's own docs, byte by byte. They take turns, so that other work
on the machine affects both alike. It needs PyTorch: pip install '.[torch]' in the checkout.

On a Hopper GPU, a hundred million parameters in bfloat16: train_gpt.py --device cuda --dtype bfloat16 --steps 200
--layers 8 --width 1024 --heads 8 --context 2048 --batch 8
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from catalog.torch import scaled_dot_product_attention

VOCABULARY = 256
REPOSITORY = Path(__file__).parent.parent
WARM_UP_STEPS = 20
ROWS = 10
APART = {"float32": 0.05, "bfloat16": 0.2}  # losses that differ by more are not explained by rounding


class Block(nn.Module):
    """Causal attention, then two linear layers, each added to what came in."""

    def __init__(self, width: int, heads: int, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))  # views: neither attention copies them
        attended = self.attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(attended)
        return x + torch.Tensor(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A decoder of bytes."""

    def __init__(
        self, layers: int, width: int, heads: int, context: int, attention: Callable[..., torch.Tensor]
    ) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map bytes, (batch, tokens), to the logits of the next bytes."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.bytes(tokens) + self.places(places))
        return torch.Tensor(self.head(self.norm(x)))


class Training:
    """A model with its optimizer, its losses and the seconds of its steps."""

    def __init__(self, asked: argparse.Namespace, attention: Callable[..., torch.Tensor]) -> None:
        torch.manual_seed(asked.seed)  # the same weights for every attention
        self.model = GPT(asked.layers, asked.width, asked.heads, asked.context, attention).to(asked.device)
        self.autocast = partial(torch.autocast, asked.device, torch.bfloat16, asked.dtype == "bfloat16")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=asked.lr, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS)
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        """Train on one batch of bytes, (batch, context + 1)."""
        start = time.perf_counter()
        with self.autocast():
            logits = self.model(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())  # waits for a GPU
        self.seconds.append(time.perf_counter() - start)


def docs() -> torch.Tensor:
    """Return the bytes of all Markdown files of this repository."""
    text = b"\n".join(path.read_bytes() for path in sorted(REPOSITORY.glob("**/*.md")) if ".venv" not in path.parts)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 300), ("batch", 2), ("context", 256), ("layers", 4), ("width", 256), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=APART, default="float32", help="the type of matrix products and attention")
    asked = parser.parse_args()

    text = docs()
    trainings = {
        "PyTorch's": Training(asked, functional.scaled_dot_product_attention),
        "the catalog's": Training(asked, scaled_dot_product_attention),
    }
    theirs, ours = trainings.values()
    parameters = sum(parameter.numel() for parameter in ours.model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {len(text):,} bytes, {asked.batch} x {asked.context} bytes a step\n")

    print("step  loss, PyTorch's  the catalog's    apart")
    generator = torch.Generator().manual_seed(asked.seed)
    for step in range(asked.steps):
        starts = torch.randint(len(text) - asked.context, (asked.batch,), generator=generator)
        batch = torch.stack([text[start : start + asked.context + 1] for start in starts.tolist()]).to(asked.device)
        for training in trainings.values():
            training.step(batch)
        if step % max(1, asked.steps // ROWS) == 0 or step == asked.steps - 1:
            apart = abs(theirs.losses[-1] - ours.losses[-1])
            print(f"{step:4}  {theirs.losses[-1]:15.4f}  {ours.losses[-1]:13.4f}  {apart:.1e}", flush=True)

    print("\nattention      ms a step  tokens a second  last loss")
    for name, training in trainings.items():
        timed = sorted(training.seconds[1:] or training.seconds)  # the first step compiles kernels
        median = timed[len(timed) // 2]
        tokens = asked.batch * asked.context / median
        print(f"{name:13}  {1e3 * median:9.1f}  {tokens:15,.0f}  {training.losses[-1]:9.4f}")

    worst = max(abs(a - b) for a, b in zip(theirs.losses, ours.losses, strict=True))
    print(f"\nThe losses are never more than {worst:.1e} apart.")
    assert worst < APART[asked.dtype], "the losses disagree"


if __name__ == "__main__":
    main()
