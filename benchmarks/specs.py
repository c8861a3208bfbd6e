"""Shapes of the parameters of real models.

Kernels have Flax's shapes: (height, width, in, out) and (in, out).
"""

import dataclasses
import math
from itertools import pairwise

type Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Spec:
    """The parameters of a model, in the order of its layers.

    Attributes:
        name: the model, and the difference from the original model.
        shapes: one per leaf.
        fp32: the indices of BatchNorm's leaves, which O2 and O5 keep in float32.
    """

    name: str
    shapes: tuple[Shape, ...]
    fp32: frozenset[int] = frozenset()

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each leaf."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def total(self) -> int:
        """The number of elements of all leaves."""
        return sum(self.sizes)

    @property
    def total_fp32(self) -> int:
        """The number of elements of the leaves that stay in float32."""
        return sum(self.sizes[leaf] for leaf in self.fp32)


def resnet50(
    blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
) -> Spec:
    """ResNet-50: He et al., arXiv:1512.03385, as torchvision builds it."""
    # A convolution is a kernel, then the scale and the bias of its BatchNorm.
    layers = [(7, 7, 3, width)]
    features = width
    for stage, depth in enumerate(blocks):
        inner = width << stage
        for block in range(depth):
            layers += [(1, 1, features, inner), (3, 3, inner, inner)]
            layers += [(1, 1, inner, 4 * inner)]
            if block == 0:  # a shortcut that changes the number of features
                layers += [(1, 1, features, 4 * inner)]
            features = 4 * inner
    shapes = [s for kernel in layers for s in (kernel, kernel[-1:], kernel[-1:])]
    batchnorm = frozenset(leaf for leaf in range(len(shapes)) if leaf % 3)
    head = [(features, classes), (classes,)]
    return Spec("ResNet-50", (*shapes, *head), batchnorm)


def bert_large(
    layers: int = 24, width: int = 1024, vocabulary: int = 30_522, length: int = 512
) -> Spec:
    """BERT-large, uncased: Devlin et al., arXiv:1810.04805.

    It includes the heads of the pretraining: the pooler, the masked language model with
    a tied embedding, and next-sentence prediction.
    """
    norm = [(width,), (width,)]
    square, mlp = _dense(width, width), _dense(width, 4 * width, width)
    embeddings = [(vocabulary, width), (length, width), (2, width), *norm]
    layer = [*square * 4, *norm, *mlp, *norm]  # query, key, value, output
    heads = [*square, *square, *norm, (vocabulary,), *_dense(width, 2)]
    return Spec("BERT-large", (*embeddings, *layer * layers, *heads))


def gpt2_xl(
    layers: int = 48, width: int = 1600, vocabulary: int = 50_257, length: int = 1024
) -> Spec:
    """GPT-2 XL: Radford et al., 2019. The head shares the token embedding."""
    norm = [(width,), (width,)]
    attention = [*_dense(width, 3 * width), *_dense(width, width)]
    block = [*norm, *attention, *norm, *_dense(width, 4 * width, width)]
    embeddings = [(vocabulary, width), (length, width)]
    return Spec("GPT-2 XL", (*embeddings, *block * layers, *norm))


def llama_8b_shard(
    layers: int = 32,
    width: int = 4096,
    mlp: int = 14_336,
    vocabulary: int = 128_256,
    heads: int = 32,
    kv_heads: int = 8,
    devices: int = 8,
) -> Spec:
    """Llama 3 8B, arXiv:2407.21783: one device's share of each leaf under FSDP."""
    kv = width // heads * kv_heads
    attention = [(width, width), (width, kv), (width, kv), (width, width)]
    gated = [(width, mlp), (width, mlp), (mlp, width)]
    layer = [(width,), *attention, (width,), *gated]
    whole = [(vocabulary, width), *layer * layers, (width,), (width, vocabulary)]
    shares = tuple((first // devices, *rest) for first, *rest in whole)
    return Spec(f"Llama 3 8B, 1/{devices} of each leaf", shares)


def many_leaves(pairs: int = 150, width: int = 768) -> Spec:
    """Returns as many vectors as square matrices, to count kernels."""
    return Spec(f"{2 * pairs} leaves", ((width,), (width, width)) * pairs)


def tiny_leaves(count: int = 10_000, least: int = 64, most: int = 256) -> Spec:
    """Returns shuffled vectors of every length from `least` to `most`."""
    lengths = most - least + 1
    # 37 and 193 are coprime, so every length occurs.
    shapes = tuple((least + 37 * leaf % lengths,) for leaf in range(count))
    return Spec(f"{count:,} tiny leaves", shapes)


def single_leaf(size: int = 2**29) -> Spec:
    """Returns one leaf, by default 1 GiB in half precision."""
    return Spec(f"one leaf of {size:,}", ((size,),))


def gpu_specs() -> tuple[Spec, ...]:
    """Returns the specs to time on a GPU. Specs that compile slowly are last."""
    models = (bert_large(), resnet50(), llama_8b_shard(), single_leaf(), gpt2_xl())
    return (many_leaves(), *models, tiny_leaves(500))


def small_specs() -> tuple[Spec, ...]:
    """Returns small trees for a CPU, where XLA compiles a few leaves per second."""
    block = dataclasses.replace(resnet50(blocks=(1,)), name="one block of ResNet-50")
    return (single_leaf(2**22), block, many_leaves(pairs=4), tiny_leaves(8))


def _dense(*widths: int) -> list[Shape]:
    """Returns the kernels and biases of a chain of dense layers."""
    return [shape for pair in pairwise(widths) for shape in (pair, pair[1:])]
