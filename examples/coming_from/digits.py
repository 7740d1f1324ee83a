"""The data of docs/coming-from: scikit-learn's digits over 50 clients of 28 images each.

The training images, sorted by class, are cut into 100 shards, and every client gets two of them:
most clients have images of two classes. All clients have the same size, so that weighting by size
and uniform weights are the same. Only numpy and scikit-learn are needed.
"""

import numpy as np
from sklearn.datasets import load_digits

CLIENTS, IMAGES = 50, 28

rng = np.random.default_rng(0)
images, labels = load_digits(return_X_y=True)
train, test = np.split(rng.permutation(len(labels)), [CLIENTS * IMAGES])
x, y = (images[train] / 16).astype("float32"), labels[train].astype("int64")
x_test, y_test = (images[test] / 16).astype("float32"), labels[test].astype("int64")

shards = rng.permutation(np.argsort(y, kind="stable").reshape(2 * CLIENTS, -1))
parts = list(rng.permuted(shards.reshape(CLIENTS, IMAGES), axis=1))  # the rows of each client
