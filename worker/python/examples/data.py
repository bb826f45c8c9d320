"""What the examples learn from: data that Debian has packages of."""

import gzip
import pathlib
import struct

import torch

# Debian's package dataset-fashion-mnist: 70,000 grey images of clothes, 28 x 28, in 10 classes.
FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
# Text that every Debian system has: licences, 0.2 MB of English.
LICENSES = "/usr/share/common-licenses"


def fashion_mnist(part, folder=FASHION_MNIST):
    """Images [n, 1, 28, 28] in float32 with mean 0 and deviation 1, and labels [n] in int64.

    part: "train" (60,000 images) or "t10k" (the 10,000 to test with).
    """
    folder = pathlib.Path(folder)
    images = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", dimensions=3)
    labels = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", dimensions=1)
    # The mean and deviation of the training images.
    return (images.unsqueeze(1).float() / 255 - 0.286) / 0.353, labels.long()


def _read_idx(path, dimensions):
    """An idx file: two zeros, the type (8: bytes), the number of dimensions, each of them, the values."""
    if not path.is_file():
        raise SystemExit(f"there is no {path}: install Debian's package dataset-fashion-mnist, or say "
                         "where the files are with --data")
    content = gzip.decompress(path.read_bytes())
    header = 4 * (1 + dimensions)
    magic, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    if magic != 0x800 + dimensions:
        raise SystemExit(f"{path} begins with {magic:#x}, expected {0x800 + dimensions:#x}: this is no "
                         f"idx file of bytes in {dimensions} dimensions")
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).view(shape)


def characters(folder=LICENSES):
    """All texts of a folder as one tensor of numbers [n] in int64, and the characters that they stand
    for: number i is alphabet[i]."""
    files = sorted(path for path in pathlib.Path(folder).iterdir() if not path.is_symlink())
    if not files:
        raise SystemExit(f"there are no texts in {folder}: say where some are with --data")
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    alphabet = sorted(set(text))
    number_of = {character: number for number, character in enumerate(alphabet)}
    return torch.tensor([number_of[character] for character in text]), alphabet


def batches_of_images(images, labels, batch, steps, seed, rank, size):
    """`steps` batches for one worker.

    Every epoch has an order of its own, the same on all workers, and each worker takes every size-th
    image of it: so none is seen twice in an epoch.
    """
    made = 0
    epoch = 0
    while made < steps:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        mine = order[rank::size]
        # What does not fill a batch is left out, so that all workers have equally many.
        for at in range(0, len(images) // size - batch + 1, batch):
            if made == steps:
                return
            chosen = mine[at:at + batch]
            yield images[chosen], labels[chosen]
            made += 1
        epoch += 1
