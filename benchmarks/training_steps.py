"""A training step of GPT-2 with Flax, with jamp at each level, by hand, and with torch.

All steps of a size train the same model on the same tokens with AdamW. Attention is
cuDNN's and torch's fused kernel, or all models write out the scores and the softmax.
cuDNN does not accept float32, so float32 models always write them out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jamp
from benchmarks.lean_transformers import GPT2

LEVELS = ("O0", "O1", "O2", "O4", "O5", "O6")
BY_HAND = "by hand, bfloat16"
JITTED = ("flax", BY_HAND, *LEVELS)
TORCH = tuple(
    f"torch {half}{how}"
    for half in ("bfloat16", "float16")
    for how in ("", ", compiled")
)
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 1e-2


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of a GPT-2 and of a batch of tokens."""

    depth: int = 12
    width: int = 768
    vocabulary: int = 50_304  # a multiple of 128
    batch: int = 8
    length: int = 1024
    heads: int = 12
    fused: bool = False
    scan: bool = False  # layers under scan and remat

    @property
    def tokens(self) -> np.ndarray:
        rng, shape = np.random.default_rng(0), (self.batch, self.length)
        return rng.integers(self.vocabulary, size=shape, dtype=np.int32)

    @property
    def model(self) -> GPT2:
        """The model in float32, with its scores written out."""
        options = {"scan": self.scan, "heads": self.heads}
        return GPT2(self.depth, self.width, self.vocabulary, **options)

    def small(self) -> "Size":
        """Returns a small size for a rehearsal on a CPU."""
        sizes = {"depth": 2, "width": 96, "vocabulary": 256, "batch": 4, "length": 32}
        return dataclasses.replace(self, heads=12, **sizes)

    def flops(self, who: str) -> tuple[float, float]:
        """Returns the FLOPs of a step's matmuls, in half and in fp8, without remat."""
        count = self.batch * self.length
        layers = 6 * count * self.depth * 12 * self.width**2
        attention = 12 * count * self.depth * self.length * self.width
        head = 6 * count * self.vocabulary * self.width
        if who == "O6":
            return head + attention, layers
        return head + attention + layers, 0


# The smallest model of Radford et al., 2019, with a padded vocabulary, and one of 1.3
# billion params, as in Brown et al., 2020, with 16 heads.
SIZES = {
    "fused, 8": Size(fused=True),
    "fused, 64": Size(fused=True, batch=64),
    "written out, 8": Size(),
    "1.3B, 8": Size(depth=24, width=2048, heads=16, fused=True, scan=True),
}


def jitted(
    who: str, size: Size, fused: str = "cudnn"
) -> tuple[Callable[[], Any], Callable]:
    """Returns `init() -> state` and `step(state, tokens) -> state, loss` to jit."""
    model = size.model.clone(dtype=jnp.bfloat16) if who == BY_HAND else size.model
    if size.fused and who not in ("flax", "O0"):
        model = model.clone(fused=fused)
    tx = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def loss_fn(params: Any, tokens: Array, apply: Callable) -> Array:
        logits = apply({"params": params}, tokens)[:, :-1].astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits, tokens[:, 1:]).mean()

    def init():
        params = size.model.init(jax.random.key(0), size.tokens[:1])["params"]
        if who not in LEVELS:
            return params, tx.init(params)
        return jamp.initialize(params, tx, who, apply_fn=model.apply, verbosity=0)

    def plain_step(state: Any, tokens: Array) -> tuple[Any, Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, model.apply)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def amp_step(state: jamp.AmpState, tokens: Array) -> tuple[Any, Array]:
        grad = jamp.scaled_value_and_grad(loss_fn)
        loss, grads = grad(state, tokens, state.apply_fn)
        return state.apply_gradients(grads=grads), loss

    return init, amp_step if who in LEVELS else plain_step


def torch_step(who: str, size: Size, device: str) -> Callable[[], float]:
    """Returns torch.amp's documented step, which returns the loss."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True  # as XLA does by default

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = (
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
            q, k, v = (
                y.view(batch, length, size.heads, -1).transpose(1, 2) for y in (q, k, v)
            )
            if size.fused:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
                mask = torch.ones(length, length, dtype=torch.bool, device=x.device)
                scores = scores.masked_fill(~mask.tril(), float("-inf"))
                y = scores.softmax(-1).to(v.dtype) @ v
            x = x + self.out(y.transpose(1, 2).reshape(x.shape))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(size.vocabulary, size.width)
            self.place = nn.Embedding(size.length, size.width)
            self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.depth)))
            self.norm = nn.LayerNorm(size.width)
            for embedding in (self.token, self.place):  # as Flax does
                nn.init.normal_(embedding.weight, std=size.width**-0.5)

        def forward(self, tokens: Any) -> Any:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.norm(self.blocks(self.token(tokens) + self.place(places)))
            return F.linear(x, self.token.weight)

    half = torch.bfloat16 if "bfloat16" in who else torch.float16
    model = Model().to(device)
    options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    optimizer = torch.optim.AdamW(model.parameters(), **options, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=half == torch.float16)
    run = torch.compile(model) if who.endswith("compiled") else model
    tokens = torch.from_numpy(size.tokens).long().to(device)

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast(device, half):
            logits = run(tokens)[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()  # waits for the device

    return step
