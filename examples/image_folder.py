"""Read folders of images, with a subfolder per class, in batches of bytes.

    train = ImageFolder("imagenet/train", batch_size=256)
    for images, labels in train.shuffled(seed=0, start=0, stop=10 * len(train)):
        images = (images - MEAN) / STD  # on the device: a byte is a quarter of a float

This works like torchvision's ImageFolder with a DataLoader: threads decode a few
batches ahead. The order depends only on the seed. `train_and_val` draws images if there
are none.
"""

import collections
import concurrent.futures
import itertools
import pathlib
import tempfile

import jax
import numpy as np
from PIL import Image

# ImageNet's mean and deviation per channel, for values from 0 to 255.
MEAN = 255 * np.float32([0.485, 0.456, 0.406])
STD = 255 * np.float32([0.229, 0.224, 0.225])

COLORS = {"red": (220, 20, 60), "green": (46, 139, 87), "blue": (65, 105, 225)}
COLORS |= {"yellow": (255, 215, 0)}
PATTERNS = "plain", "stripes", "checks"
DRAWN = pathlib.Path(tempfile.gettempdir()) / "jamp_patterns"


class ImageFolder:
    """A folder with `classes` and `files`. Its length is the batches per epoch.

    `image_size` is the size of the scaled images, `sharding` places the batches on
    devices (by default one), and `workers` is the number of threads.
    """

    def __init__(self, folder, batch_size, image_size=224, workers=4, sharding=None):
        self.batch_size, self.image_size = batch_size, image_size
        self.workers, self.sharding = workers, sharding
        folders = sorted(f for f in pathlib.Path(folder).iterdir() if f.is_dir())
        self.classes = [path.name for path in folders]
        self.files = [
            (path, label)
            for label, folder in enumerate(folders)
            for path in sorted(folder.iterdir())
        ]

    def __len__(self):
        return len(self.files) // self.batch_size

    def shuffled(self, seed, start, stop):
        """Yields batches `start` to `stop`, counted over epochs: crops, some mirrored.

        All batches are full, so each epoch drops a few images.
        """
        if not len(self):
            raise ValueError(
                f"A batch of {self.batch_size} is more than {len(self.files)} images."
            )

        def chunks():
            for epoch in range(start // len(self), -(-stop // len(self))):
                rng = np.random.default_rng((seed, epoch))
                order = rng.permutation(len(self.files))
                for i in range(len(self)):
                    if start <= epoch * len(self) + i < stop:
                        chunk = order[i * self.batch_size :][: self.batch_size]
                        yield chunk, (seed, epoch)

        return self._load(chunks())

    def in_order(self):
        """Yields the center of each image once. Label -1 pads the last batch."""
        chunks = itertools.batched(range(len(self.files)), self.batch_size)
        return self._load((chunk, None) for chunk in chunks)

    def _load(self, chunks):
        waiting = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
            for chunk in chunks:
                waiting.append(pool.submit(self._batch, *chunk))
                if len(waiting) > self.workers:  # limits the memory
                    yield jax.device_put(waiting.popleft().result(), self.sharding)
            while waiting:
                yield jax.device_put(waiting.popleft().result(), self.sharding)

    def _batch(self, chunk, seed):
        images = np.zeros((self.batch_size, *[self.image_size] * 2, 3), np.uint8)
        labels = np.full(self.batch_size, -1, np.int32)
        for row, i in enumerate(chunk):
            path, labels[row] = self.files[i]
            rng = np.random.default_rng((*seed, i)) if seed else None
            images[row] = decode(path, self.image_size, rng)
        return images, labels


def decode(path, size, rng=None):
    """Crops the center, 7/8 of the short side, or with `rng` a random part.

    The random part follows torchvision's RandomResizedCrop (8 % to 100 % of the area,
    3:4 to 4:3, clipped to the image) and RandomHorizontalFlip.
    """
    with Image.open(path) as file:
        image = file.convert("RGB")
    whole = np.array(image.size)
    crop, place, turn = np.repeat(whole.min() * 7 / 8, 2), 0.5, 1
    if rng is not None:
        ratio = np.exp(rng.uniform(*np.log([3 / 4, 4 / 3])))
        area = whole.prod() * rng.uniform(0.08, 1)
        crop = np.minimum(np.sqrt([area * ratio, area / ratio]), whole)
        place, turn = rng.uniform(size=2), rng.choice([1, -1])
    corner = (whole - crop) * place
    box = (*corner, *corner + crop)
    return np.asarray(image.resize((size, size), Image.BILINEAR, box))[:, ::turn]


def train_and_val(folder, *args, drawn=None):
    """Opens train/ and val/ of a folder, or draws patterns into `drawn`."""
    if not (folder and folder.is_dir()):
        drawn = drawn or DRAWN
        print(f"{folder} is not a folder: patterns, from {drawn}")
        folder = drawn
        if not folder.is_dir():
            draw_patterns(folder)
    return [ImageFolder(folder / name, *args) for name in ("train", "val")]


def draw_patterns(folder, each=120, size=64):
    """Draws 12 classes of noisy patterns. One image in six goes to val/."""
    rng, draft = np.random.default_rng(0), folder.with_name(folder.name + "_draft")
    grid = np.indices((size, size)).reshape(2, -1)
    for color, pattern, i in itertools.product(COLORS, PATTERNS, range(each)):
        turn, period = rng.uniform(0, 2 * np.pi), rng.uniform(16, 32)
        axes = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
        u, v = np.sin(2 * np.pi / period * (axes @ grid) + rng.uniform(0, 6, (2, 1)))
        inked = {"plain": u < 2, "stripes": u > 0, "checks": u * v > 0}[pattern]
        pixels = np.where(inked[:, None], COLORS[color], 128)
        pixels = pixels + rng.normal(0, 30, (size * size, 1))
        pixels = pixels.clip(0, 255).astype(np.uint8).reshape(size, size, 3)
        path = draft / ("train" if i % 6 else "val") / f"{color}_{pattern}"
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path / f"{i:03}.png")
    draft.rename(folder)  # so that a partial folder never counts as complete
