"""Continuous batching: a server of a Llama over a paged cache, whose tokens are those of eager generate().

Requests arrive while others are running. Each step takes one token of each request that is being decoded and parts of
prompts, up to a budget, in one batch. A request's pages are freed at its end; when pages run out, the latest request
gives its own back and starts again later. The weights are random. It needs transformers: pip install '.[transformers]'
in the checkout.

On a GPU, steps without prompts are CUDA graphs: continuous_batching.py --device cuda --dtype bfloat16 --width 1024
--layers 8 --heads 16 --pages 400. In 16 bits, tokens may differ from eager's where rounding cannot tell logits apart.
"""

import argparse
import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from catalog.integrations import transformers
from catalog.integrations.paged import CachedSequence, PagedCache, Step

VOCABULARY = 512


@dataclass(eq=False)
class Request:
    """A prompt, and what follows it."""

    arrival: int
    prompt: list[int]
    limit: int
    generated: list[int] = field(default_factory=list)
    cached: CachedSequence = field(default_factory=CachedSequence)

    @property
    def pending(self) -> list[int]:
        """Tokens that are not cached: the prompt, the rest of it, or what was generated last."""
        return [*self.prompt, *self.generated][self.cached.length :]


class Decoding:
    """Steps of up to a number of requests with one new token each: a CUDA graph, or the same without a graph."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, requests: int, tokens: int) -> None:
        self.step = cache.fixed_step(requests, tokens)
        self.tokens = torch.zeros(requests, dtype=torch.int64, device=cache.device)
        self.logits = torch.empty(0)

        def forward() -> None:
            self.logits = logits_of(model, self.tokens, self.step)

        self.replay: Callable[[], None] = forward
        if cache.device.type == "cuda":
            forward()  # loads the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                forward()
            self.replay = graph.replay


class Server:
    """Serves requests in the order of their arrival."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, budget: int, longest: int) -> None:
        self.model, self.cache, self.budget, self.longest = model, cache, budget, longest
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.decoding: dict[int, Decoding] = {}
        self.steps = self.fixed_steps = self.preemptions = 0

    def step(self) -> None:
        """Compute one batch, and end the requests that have all their tokens."""
        batch = self.schedule()
        tokens = [token for request, count in batch for token in request.pending[:count]]
        sequences = [(request.cached, count) for request, count in batch]
        if len(tokens) == len(batch):
            logits = self.decode(tokens, sequences)
        else:
            plan = self.cache.plan(sequences)
            logits = logits_of(self.model, torch.tensor(tokens, device=self.cache.device), plan)
        following = logits.argmax(-1).tolist()
        for (request, _), token in zip(batch, following, strict=False):
            if not request.pending:
                request.generated.append(token)
            if len(request.generated) == request.limit:
                self.cache.release(request.cached)
                self.running.remove(request)
        self.steps += 1

    def decode(self, tokens: list[int], sequences: list[tuple[CachedSequence, int]]) -> torch.Tensor:
        """Logits of a step without prompts, by the smallest fixed step that has room."""
        size = 1 << (len(tokens) - 1).bit_length()
        if size not in self.decoding:
            self.decoding[size] = Decoding(self.model, self.cache, size, self.longest)
        decoding = self.decoding[size]
        decoding.step.refill(sequences)
        decoding.tokens[: len(tokens)] = torch.tensor(tokens)
        decoding.replay()
        self.fixed_steps += 1
        return decoding.logits

    def schedule(self) -> list[tuple[Request, int]]:
        """The requests of a step with their numbers of tokens, those with one token first."""
        batch, budget = [], self.budget
        for request in list(self.running):
            count = min(len(request.pending), budget)
            while request in self.running and count and not self.cache.grow(request.cached, count):
                self.preempt()
            if request in self.running and count:
                batch.append((request, count))
                budget -= count
        while self.waiting and budget:
            request = self.waiting[0]
            count = min(len(request.pending), budget)
            if not self.cache.grow(request.cached, count):
                break
            self.running.append(self.waiting.popleft())
            batch.append((request, count))
            budget -= count
        batch = [(request, count) for request, count in batch if request in self.running]
        return sorted(batch, key=lambda each: each[1] > 1)

    def preempt(self) -> None:
        """Take the pages of the latest running request: it computes its tokens so far again, later."""
        request = self.running.pop()
        self.cache.release(request.cached)
        self.waiting.appendleft(request)
        self.preemptions += 1


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor, step: Step) -> torch.Tensor:
    """The logits after the last token of each sequence of a step."""
    positions = step.positions[None]
    result = model(tokens[None], position_ids=positions, step=step, use_cache=False, logits_to_keep=step.last)
    return torch.Tensor(result.logits[0])


@torch.no_grad()
def serve(server: Server, requests: list[Request]) -> float:
    """Serve requests, two of which arrive with each step; return the seconds."""
    start, coming = time.perf_counter(), deque(requests)
    while coming or server.waiting or server.running:
        while coming and coming[0].arrival <= server.steps:
            server.waiting.append(coming.popleft())
        server.step()
    return time.perf_counter() - start


@torch.no_grad()
def eager_tokens(model: PreTrainedModel, request: Request) -> list[int]:
    """What generate() of a model with eager attention appends to the prompt."""
    prompt = torch.tensor([request.prompt], device=model.device)
    tokens: list[int] = model.generate(prompt, max_new_tokens=request.limit, do_sample=False)[0].tolist()
    return tokens[len(request.prompt) :]


@torch.no_grad()
def agrees(model: PreTrainedModel, exact: PreTrainedModel, request: Request) -> bool:
    """Whether eager generate() gives the same tokens, up to a choice between logits that rounding cannot tell apart.

    ``exact`` has the same weights in float64: eager's largest difference from its logits is the rounding error. Two
    logits may change places if each is off by as much, once in eager's and once in the server's.
    """
    tokens = eager_tokens(model, request)
    if tokens == request.generated:
        return True
    first = next(i for i, (one, other) in enumerate(zip(tokens, request.generated, strict=True)) if one != other)
    before = torch.tensor([request.prompt + tokens[:first]], device=model.device)
    logits, reference = (each(before, logits_to_keep=1).logits[0, -1].double() for each in (model, exact))
    error = (logits - reference).abs().max()
    return bool(logits[tokens[first]] - logits[request.generated[first]] <= 4 * error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("requests", 64), ("layers", 2), ("width", 64), ("heads", 4), ("pages", 40), ("budget", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch: more make small matrices slower")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    asked = parser.parse_args()

    torch.set_num_threads(asked.threads)
    transformers.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=asked.width,
        intermediate_size=3 * asked.width,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.heads,
        num_key_value_heads=asked.heads // 2,
        vocab_size=VOCABULARY,
        initializer_range=0.1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(asked.device, getattr(torch, asked.dtype)).eval()
    dice = torch.Generator().manual_seed(1)
    requests = [
        Request(
            arrival=i // 2,
            prompt=torch.randint(VOCABULARY, (int(torch.randint(1, 90, (), generator=dice)),), generator=dice).tolist(),
            limit=int(torch.randint(4, 24, (), generator=dice)),
        )
        for i in range(asked.requests)
    ]

    page_size, hdim = 16, asked.width // asked.heads
    cache = PagedCache(
        asked.layers, asked.pages, page_size, asked.heads // 2, hdim, dtype=model.dtype, device=asked.device
    )
    free = cache.free_pages
    server = Server(model, cache, asked.budget, longest=max(len(each.prompt) + each.limit for each in requests))
    model.set_attn_implementation(transformers.PAGED)
    seconds = serve(server, requests)
    model.set_attn_implementation("eager")
    exact = copy.deepcopy(model).double()
    equal = sum(agrees(model, exact, request) for request in requests)

    tokens = sum(len(request.generated) for request in requests)
    print(f"requests     {len(requests)}, prompts of {sum(len(request.prompt) for request in requests)} tokens in all")
    print(f"steps        {server.steps}, of which {server.fixed_steps} decode only")
    print(f"preemptions  {server.preemptions}, with {free} pages of {page_size} tokens")
    print(f"generated    {tokens} tokens in {seconds:.2f} s")
    print(f"equal        {equal} of {len(requests)} requests have the tokens of eager generate()")
    assert equal == len(requests)
    assert cache.free_pages == free, "all pages are free again"


if __name__ == "__main__":
    main()
