"""Fixed parameter expansion on one screen: plain loops, read it top to bottom. The tests' oracle.

A network with one hidden layer is z = W2 · relu(W1 x + b1) + b2, W1 (h x d), W2 (C x h).
"""

import numpy as np


def expand(w1, b1, w2, owner, alpha, extra=0):
    """Split each neuron into alpha children; owner[i][j] is the child that inherits input j."""
    (h, d), outputs = w1.shape, len(w2)
    wide1 = np.zeros((alpha * h, d))
    wide2 = np.zeros((outputs, alpha * h))
    bias1 = np.zeros(alpha * h)
    entries = []  # every weight of the wide network, as (order of removal, matrix, row, column)

    for i in range(h):
        for k in range(alpha):
            bias1[i * alpha + k] = b1[i]  # each child inherits the whole bias

    for i in range(h):
        for j in range(d):
            child = i * alpha + owner[i][j]  # and its own share of the inputs
            wide1[child, j] = w1[i, j]
            entries.append((-abs(w1[i, j]), len(entries), wide1, child, j))

    for c in range(outputs):
        for i in range(h):
            for k in range(alpha):
                wide2[c, i * alpha + k] = w2[c, i]  # and the parent's outgoing weights, undivided
                entries.append((-abs(w2[c, i]), len(entries), wide2, c, i * alpha + k))

    # Prune back: largest magnitude first, ties in order of storage, W1 before W2.
    budget = np.count_nonzero(w1) + np.count_nonzero(w2) - extra
    for _, _, matrix, row, column in sorted(entries, key=lambda e: e[:2])[budget:]:
        matrix[row, column] = 0
    return wide1, bias1, wide2


def forward(x, layers):
    """Run linear layers [(weight, bias), ...] with ReLU between them."""
    for weight, bias in layers[:-1]:
        x = np.maximum(x @ weight.T + bias, 0)
    weight, bias = layers[-1]
    return x @ weight.T + bias
