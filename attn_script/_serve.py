"""A server in small: requests of uneven lengths come and go, in slots of one batch; keys and values lie in pages, which
are given as a request grows and taken back when it ends. A Hugging Face model runs it, greedily."""

import itertools
import random
import time
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_model(device, sizes):
    """A Llama with random weights, in bf16 on a GPU."""
    layers, heads, kv_heads, dim, inner, words = sizes
    config = LlamaConfig(
        hidden_size=heads * dim, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=dim, intermediate_size=inner, vocab_size=words, max_position_embeddings=8192, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return model.eval()


@dataclass
class Request:
    """A prompt, how many tokens may follow, in which step it arrives, and what was said."""

    prompt: list[int]
    wanted: int
    arrives: int = 0
    said: list[int] = field(default_factory=list)


def draw_requests(count, longest, most, vocabulary, slots):
    """Prompts and numbers of tokens of many sizes; the first fill the slots at once, then one arrives in each step."""
    draw = random.Random(0)
    return [
        Request(
            [draw.randrange(vocabulary) for _ in range(int(longest ** draw.random()) + 1)],
            draw.randrange(most // 4, most + 1), max(0, n - slots),
        )
        for n in range(count)
    ]  # fmt: skip


class Pages:
    """Keys and values of all layers, and whose pages are whose. Page 0 is nobody's: an empty slot writes there.

    table: int32 (slots, most pages); lengths: int32 (slots,); starts: where each prompt begins in a step that reads
    prompts, else None; at: the page of each row of a step, and the place in it.
    """

    def __init__(self, config, slots, longest, page, device, dtype):
        most = -(-longest // page)
        heads, dim = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, slots * most + 1, page, heads, dim)
        self.keys, self.values = torch.zeros(2, *shape, device=device, dtype=dtype)
        self.table = torch.zeros(slots, most, device=device, dtype=torch.int32)
        self.lengths = torch.zeros(slots, device=device, dtype=torch.int32)
        self.rows = torch.arange(slots, device=device)
        self.page, self.starts, self.at = page, None, None
        self.free = list(range(1, slots * most + 1))
        self.held = [[] for _ in range(slots)]

    def give(self, slot, length):
        """As many pages as so many keys need."""
        while len(self.held[slot]) * self.page < length:
            page = self.free.pop()
            self.table[slot, len(self.held[slot])] = page
            self.held[slot].append(page)

    def take_back(self, slot):
        """The pages of a request that has ended."""
        self.free += self.held[slot]
        self.held[slot] = []
        self.table[slot], self.lengths[slot] = 0, 0

    def find(self, slots, places):
        """Rows of these slots stand at these places."""
        pages = self.table[slots, torch.div(places, self.page, rounding_mode="floor")]
        self.at = pages.long(), places % self.page

    def write(self, layer, keys, values):
        """New keys and values, (rows, heads, dim), go to their pages."""
        self.keys[layer][self.at], self.values[layer][self.at] = keys, values


class Server:
    """A batch of slots for requests. captured: one CUDA graph is each step's, whatever the lengths."""

    def __init__(self, model, slots, longest, page):
        device = model.device
        self.model, self.pages = model, Pages(model.config, slots, longest, page, device, model.dtype)
        self.tokens = torch.zeros(slots, device=device, dtype=torch.long)
        self.busy = torch.zeros(slots, device=device, dtype=torch.int32)
        self.requests = [None] * slots
        self.steps, self.graph = [], None  # what each step said, and whose slots those were
        if device.type == "cuda":
            self.capture()

    @torch.no_grad()
    def decode(self):
        """The next token of each request."""
        pages = self.pages
        pages.lengths += self.busy
        places = (pages.lengths - 1).clamp(min=0)
        pages.starts = None
        pages.find(pages.rows, places)
        logits = self.model(self.tokens[None], position_ids=places[None].long(), use_cache=False, pages=pages).logits
        self.tokens.copy_(logits[0].argmax(-1))

    def capture(self):
        """decode, in a graph. Nobody is there yet."""
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            for _ in range(3):
                self.decode()
        torch.cuda.current_stream().wait_stream(other)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.decode()

    def read_prompts(self, arrived):
        """The prompts of requests that have arrived, packed, and the first token of each; arrived: by slot."""
        pages, device = self.pages, self.tokens.device
        sizes = [len(r.prompt) for r in arrived.values()]
        starts = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
        tokens = torch.tensor([t for r in arrived.values() for t in r.prompt])
        places = torch.cat([torch.arange(n) for n in sizes]).to(device)
        slots = torch.tensor(list(arrived)).to(device)
        last, pages.starts = (starts[1:] - 1).long().to(device), starts.to(device)
        pages.find(slots.repeat_interleave(torch.tensor(sizes).to(device), output_size=len(tokens)), places)
        self.tokens[slots] = self.model(
            tokens[None].to(device), position_ids=places[None], use_cache=False, pages=pages, logits_to_keep=last
        ).logits[0].argmax(-1)  # fmt: skip
        pages.lengths[slots] = torch.tensor(sizes, dtype=torch.int32).to(device)
        self.busy[slots] = 1

    @torch.no_grad()
    def serve(self, requests):
        """All requests, as they arrive; the most that were served at once, and the most pages held at once."""
        waiting, step, most, held = list(requests), 0, 0, 0
        left = {}  # tokens that are still to come, by slot
        while waiting or left:
            arrived = {}
            for slot, holder in enumerate(self.requests):
                if holder is None and waiting and waiting[0].arrives <= step:
                    arrived[slot] = self.requests[slot] = waiting.pop(0)
                    self.pages.give(slot, len(arrived[slot].prompt))
                    left[slot] = arrived[slot].wanted
            if arrived:
                self.read_prompts(arrived)
            else:
                for slot in left:
                    request = self.requests[slot]
                    self.pages.give(slot, len(request.prompt) + request.wanted - left[slot] + 1)
                self.decode() if self.graph is None else self.graph.replay()
            spoke = arrived or {slot: self.requests[slot] for slot in left}
            self.steps.append((self.tokens.clone(), dict(spoke)))
            most, held = max(most, len(left)), max(held, sum(map(len, self.pages.held)))
            for slot in spoke:
                left[slot] -= 1
                if not left[slot]:
                    del left[slot]
                    self.requests[slot], self.busy[slot] = None, 0
                    self.pages.take_back(slot)
            step += 1
        for said, spoke in zip(torch.stack([s for s, _ in self.steps]).tolist(), self.steps, strict=True):
            for slot, request in spoke[1].items():
                request.said.append(said[slot])
        self.steps.clear()
        return most, held


@torch.no_grad()
def by_transformers(model, requests, slots):
    """What transformers' generate says: batches of as many requests, padded on the left, each until its last ends."""
    found = []
    for first in range(0, len(requests), slots):
        group = requests[first : first + slots]
        longest = max(len(r.prompt) for r in group)
        ids = torch.tensor([[0] * (longest - len(r.prompt)) + r.prompt for r in group])
        real = torch.tensor([[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in group])
        wanted = max(r.wanted for r in group)
        out = model.generate(
            ids.to(model.device), attention_mask=real.to(model.device), max_new_tokens=wanted, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        found += [row[longest : longest + r.wanted] for row, r in zip(out.tolist(), group, strict=True)]
    return found


@torch.no_grad()
def largest_gap(model, requests, said):
    """How far below the best logit a token that was said lies at most, as this model scores what was said before it."""
    gap = 0.0
    for r, tokens in zip(requests, said, strict=True):
        ids = torch.tensor([[*r.prompt, *tokens[:-1]]], device=model.device)
        logits = model(ids, use_cache=False).logits[0, len(r.prompt) - 1 :].float()
        chosen = torch.tensor(tokens, device=model.device)[:, None]
        gap = max(gap, (logits.amax(-1) - logits.gather(1, chosen)[:, 0]).max().item())
    return gap


def timed(function, device):
    """What it returns, and seconds."""
    started = time.perf_counter()
    found = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return found, time.perf_counter() - started
