"""Own images, own CNN, judged by F1: 1,797 digits of 8 x 8 pixels over 40 uneven clients."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import Tensor, nn

import fedexp as fx

x, y = load_digits(return_X_y=True)
x = (x / 16).reshape(-1, 1, 8, 8)
order = np.random.default_rng(0).permutation(len(y))
held_out, own = order[:300], order[300:]
parts = fx.data.partition.dirichlet(y[own], clients=40, alpha=0.3, rng=np.random.default_rng(0))


def macro_f1(scores: Tensor, labels: Tensor) -> float:
    return float(f1_score(labels, scores.argmax(1), average="macro"))


task = fx.supervised(
    "my-images",
    model=lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)
    ),
    train=fx.Federation.from_parts({"x": x[own], "y": y[own]}, parts),
    test={"x": x[held_out], "y": y[held_out]},
    metrics={"f1": macro_f1},
    goal="max:test_f1",
    target=0.9,
    local=fx.LocalTraining(lr=0.1, epochs=1, batch_size=16),
    cohort=10,
    rounds=30,
)

if __name__ == "__main__":
    study = fx.compare(task, ["fedavg", "fedexp"], seeds=3)
    print(study.table())
    print(study.report("images.html"))
