"""Time whole steps of a Llama with the catalog's attention and with PyTorch's, in one process, and compare them.

Prefill of a prompt, decoding of one token for each sequence of a batch, and a training step without the optimizer. The
model has the sizes of Llama 3.2 1B and random weights; both sides run the same module. Sides take turns; figures are
medians. On a GPU, decoding is the replay of a CUDA graph. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial

import torch
from report import Row, Target, is_met, print_table, summary
from timing import Call, Pace, interleaved
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from catalog.integrations import transformers
from catalog.torch import compile_calls

SIDES = {"ours": transformers.NAME, "sdpa": "sdpa"}
LAYERS = 16
COLUMNS = ("phase", "dtype", "layers", "batch", "tokens", "ours ms", "sdpa ms", "max diff", "sdpa/ours")
TARGETS = [Target("sdpa/ours", ">=", 1.0, noise=0.01)]


def make_model(layers: int, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """Llama 3.2 1B's sizes: https://huggingface.co/meta-llama/Llama-3.2-1B."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def prefill(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """The logits after a prompt, whose keys and values are kept."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, use_cache=True, logits_to_keep=1).logits
    return logits


def train(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """The loss; gradients of all weights are left in them."""
    model.zero_grad(set_to_none=True)
    loss: torch.Tensor = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


class Decoding:
    """A step of one new token for each sequence of a batch; each call finds the same tokens in the cache."""

    def __init__(self, model: LlamaForCausalLM, batch: int, cached: int) -> None:
        config, of_model = model.config, next(model.parameters())
        self.model = model
        self.tokens = torch.randint(config.vocab_size, (batch, 1), device=of_model.device)
        self.cache = DynamicCache(config=config)
        shape = (batch, config.num_key_value_heads, cached, config.head_dim)
        for layer in range(config.num_hidden_layers):
            self.cache.update(*torch.randn(2, *shape, dtype=of_model.dtype, device=of_model.device), layer)
        self.kept = [(layer.keys, layer.values) for layer in self.cache.layers]

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(self.tokens, past_key_values=self.cache).logits
        for layer, (keys, values) in zip(self.cache.layers, self.kept, strict=True):
            layer.keys, layer.values = keys, values
        return logits


def graphed(call: Call) -> Call:
    """The replay of a call as a CUDA graph; it waits for the GPU."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def finished(call: Call) -> None:
    """The call, and the wait for the GPU."""
    call()
    torch.cuda.synchronize()


def row_of(model: LlamaForCausalLM, phase: str, batch: int, tokens: int, pace: Pace) -> Row:
    """Both sides of one phase."""
    config, on_gpu = model.config, next(model.parameters()).is_cuda
    if phase == "decode":
        step: Call = Decoding(model, batch, tokens)
    else:
        words = torch.randint(config.vocab_size, (batch, tokens), device=next(model.parameters()).device)
        step = partial(prefill if phase == "prefill" else train, model, words)

    def as_side(name: str) -> object:
        model.set_attn_implementation(SIDES[name])
        return step()

    results = {name: as_side(name) for name in SIDES}
    calls: dict[str, Call] = {name: partial(as_side, name) for name in SIDES}
    if on_gpu:
        calls = {name: graphed(call) if phase == "decode" else partial(finished, call) for name, call in calls.items()}
    seconds, runs = interleaved(calls, pace)
    ours, theirs = (result.float() for result in results.values() if isinstance(result, torch.Tensor))
    figures = {f"{side} ms": 1e3 * seconds[side] for side in SIDES}
    figures |= {"max diff": (ours - theirs).abs().max().item(), "sdpa/ours": seconds["sdpa"] / seconds["ours"]}
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    labels = {"phase": phase, "dtype": dtype, "layers": config.num_hidden_layers, "batch": batch, "tokens": tokens}
    return Row("model", labels, figures, runs)


def rows_of(options: argparse.Namespace, pace: Pace) -> Iterator[Row]:
    for dtype in options.dtype:
        torch.manual_seed(0)
        model = make_model(options.layers, getattr(torch, dtype), options.device)
        if "prefill" in options.phase:
            yield row_of(model, "prefill", 1, options.prompt, pace)
        if "decode" in options.phase:
            for batch in options.batch:
                yield row_of(model, "decode", batch, options.cached, pace)
        if "train" in options.phase:
            yield row_of(model, "train", 1, options.trained, pace)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16"])
    parser.add_argument(
        "--phase", nargs="+", choices=("prefill", "decode", "train"), default=["prefill", "decode", "train"]
    )
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="fewer take less time and memory (default 16: 1.2 B parameters)"
    )
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of prefill (default 4096)")
    parser.add_argument(
        "--cached", type=int, default=1024, help="tokens of each sequence before decoding (default 1024)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="of decoding (default 1 32)")
    parser.add_argument("--trained", type=int, default=1024, help="tokens of a training step (default 1024)")
    parser.add_argument("--runs", type=int, default=15, help="timed runs of each side (default 15)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of one row, except for its first runs (default 30)"
    )
    parser.add_argument(
        "--in-python", action="store_true", help="without catalog.torch.compile_calls(), which takes half a minute once"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each side, on the CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["CATALOG_NUM_THREADS"] = str(options.threads)  # read by the first use of the catalog's settings
    transformers.register(strict=True)
    if not options.in_python:
        compile_calls()
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {options.threads} threads"
    print(f"{where}; PyTorch {torch.__version__}")
    pace = Pace(options.runs, 1, options.seconds)
    rows = print_table(COLUMNS, TARGETS, rows_of(options, pace))
    print(f"\n{sum(is_met(row, TARGETS) for row in rows)}/{len(rows)} met")
    for line in summary(TARGETS, rows):
        print(f"    {line}")


if __name__ == "__main__":
    main()
