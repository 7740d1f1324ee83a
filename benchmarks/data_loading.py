"""Second load of CIFAR-10: 1.1 ms (bar: 1 s); Dirichlet over 100 clients: 19 ms (bar: 0.5 s).

Converting a generated EMNIST file of 3,400 writers (682,136 training examples, 2.39 GB): 15 s, with
56 MB of memory on top of the 237 MB of the imported libraries. CIFAR-10 over 100 clients: 264 ms.
PNG files: 7,000 per second (18,000 files; on 2026-11-18 at load 4).

Measured on 2026-11-15 on 2 busy CPU cores (load 5), Python 3.11.7,
torch 2.13.0, numpy 2.4.6, h5py 3.16.0, pillow 13.0.0; n = 5 loads (best), 20 partitions (median),
1 conversion. Real CIFAR-10, in the folder that FEDEXP_DATA names; needs 3 GB of temporary disk.

    python benchmarks/data_loading.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from fedexp.data.datasets import load
from fedexp.data.partition import dirichlet
from fedexp.data.sources.cifar import CIFAR10
from fedexp.data.sources.download import data_folder
from machine import Timing, hardware

WRITERS, PER_WRITER = 3400, (19, 377)  # on average 198 training examples per writer, as in EMNIST


def main() -> None:
    """Run the measurements and print one line each."""
    parser = argparse.ArgumentParser(description="how long data take to load")
    parser.add_argument("--writers", type=int, default=WRITERS, help="of the generated EMNIST file")
    parser.add_argument("--pictures", type=int, default=1800, help="PNG files of each class")
    parser.add_argument("--convert", metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert:  # in a separate process, whose peak memory is that of the conversion
        _convert(Path(args.convert))
        return
    print(f"{hardware()}; medians (min-max)")
    _second_load()
    _partition()
    _emnist(args.writers)
    _cinic(args.pictures)


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds of an action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _second_load() -> None:
    """Time the load of CIFAR-10 from its cache file, and a federation of it in memory."""
    if not CIFAR10.files(data_folder()):
        print("second load of CIFAR-10: skipped, it is not in the folder FEDEXP_DATA")
        return
    load("cifar10")
    again = [seconds(lambda: load("cifar10")) for _ in range(5)]
    parts = np.array_split(np.random.default_rng(0).permutation(50_000), 100)
    raw = load("cifar10")
    clients = [seconds(lambda: raw.federation(parts)) for _ in range(5)]
    print(f"second load of CIFAR-10: {_spread(again)} (bar: 1000 ms)")
    read = [seconds(lambda: int(np.asarray(raw.train["x"]).max())) for _ in range(5)]
    print(f"reading every byte of it: {_spread(read)}")
    print(f"CIFAR-10 over 100 clients: {_spread(clients)}")


def _spread(taken: list[float]) -> str:
    return f"{Timing(tuple(1e3 * each for each in taken))} ms"


def _partition() -> None:
    labels = np.repeat(np.arange(10), 5000)
    taken = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        taken.append(seconds(partial(dirichlet, labels, 100, 0.3, rng)))
    print(
        f"Dirichlet partition of 50,000 over 100 clients: {_spread(taken)}, {len(taken)} seeds "
        "(bar: 500 ms)"
    )


def _emnist(writers: int) -> None:
    """Generate an EMNIST file and convert it in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        examples = _generate(Path(folder), writers)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(f"generated EMNIST: {writers:,} writers, {examples:,} examples, {size / 1e9:.2f} GB")
        command = [sys.executable, __file__, "--convert", folder]
        subprocess.run(command, check=True)


def _generate(folder: Path, writers: int) -> int:
    """Write files in the layout of TensorFlow Federated; return the number of training examples."""
    import h5py

    rng = np.random.default_rng(0)
    sizes = rng.integers(*PER_WRITER, writers)
    for split, counts in (("train", sizes), ("test", np.maximum(1, sizes // 9))):
        with h5py.File(folder / f"fed_emnist_{split}.h5", "w") as file:
            for writer, count in enumerate(counts):
                group = file.create_group(f"examples/f{writer:04}_00")
                grey = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
                group["pixels"] = grey.astype(np.float32) / 255
                group["label"] = rng.integers(0, 62, count, dtype=np.int32)
    return int(sizes.sum())


def _convert(folder: Path) -> None:
    import h5py  # noqa: F401  # so that its own memory counts as imported

    emnist_before = _peak()
    first = seconds(lambda: load("emnist", folder))
    peak = _peak()
    again = seconds(lambda: load("emnist", folder))
    print(f"converting it: {first:.1f} s; loading it again: {again * 1e3:.0f} ms")
    print(
        f"peak memory: {peak:.0f} MB, of which {emnist_before:.0f} MB are the imported libraries "
        f"and {peak - emnist_before:.0f} MB the conversion"
    )


def _peak() -> float:
    """Return the peak memory of this process, in MB.

    Not from `resource`, which includes the parent's memory at the start of the process.
    """
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM"))) / 1e3


def _cinic(pictures: int) -> None:
    """Decode PNG files in the layout of CINIC-10: `pictures` of each class and split."""
    from PIL import Image

    from fedexp.data.sources.cinic import CLASSES

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "test"):
            for name in CLASSES:
                (Path(folder) / "CINIC-10" / split / name).mkdir(parents=True)
                for i in range(pictures):
                    pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                    path = Path(folder) / "CINIC-10" / split / name / f"{i:05}.png"
                    Image.fromarray(pixels).save(path)
        taken, number = seconds(lambda: load("cinic10", folder)), 20 * pictures
    print(f"decoding PNG files: {number / taken:,.0f} per second, {number:,} in {taken:.1f} s")


if __name__ == "__main__":
    main()
