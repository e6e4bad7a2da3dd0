"""Fixed parameter expansion on one screen: plain loops, read it top to bottom. The tests' oracle.

A network with one hidden layer is z = W2 · relu(W1 x + b1) + b2, W1 (h x d), W2 (C x h). A gated
one is z = down · (act(gate x) * up x); one of filters has weights (h x d x kernel positions).
"""

import numpy as np


def expand(w1, b1, w2, owner, alpha, extra=0):
    """Split each neuron into alpha children; owner[i][j] is the child that inherits input j."""
    bias1 = np.array([b1[i] for i in range(len(b1)) for _ in range(alpha)])  # the whole bias
    (wide1,), wide2 = expand_many([w1[:, :, None]], w2[:, :, None], owner, alpha, extra)
    return wide1[:, :, 0], bias1, wide2[:, :, 0]


def expand_many(firsts, second, owner, alpha, extra=0):
    """Do the same where a neuron has several first weights, (h x d x positions) each."""
    entries = []  # every weight of the wide network, as (order of removal, array, where)
    budget = sum(np.count_nonzero(weight) for weight in [*firsts, second]) - extra
    wides = []

    for weight in firsts:
        h, d, positions = weight.shape
        wide = np.zeros((alpha * h, d, positions))
        for i in range(h):
            for j in range(d):
                child = i * alpha + owner[i][j]  # each child has its own share of the inputs
                for p in range(positions):
                    wide[child, j, p] = weight[i, j, p]
                    entries.append((-abs(weight[i, j, p]), len(entries), wide, (child, j, p)))
        wides.append(wide)

    outputs, h, positions = second.shape
    wide2 = np.zeros((outputs, alpha * h, positions))
    for c in range(outputs):
        for i in range(h):
            for k in range(alpha):
                for p in range(positions):  # and the parent's outgoing weights, undivided
                    wide2[c, i * alpha + k, p] = second[c, i, p]
                    where = (c, i * alpha + k, p)
                    entries.append((-abs(second[c, i, p]), len(entries), wide2, where))

    # Prune back: largest magnitude first, ties in order of storage, the firsts before the second.
    for _, _, array, where in sorted(entries, key=lambda e: e[:2])[budget:]:
        array[where] = 0
    return wides, wide2


def forward(x, layers):
    """Run linear layers [(weight, bias), ...] with ReLU between them."""
    for weight, bias in layers[:-1]:
        x = np.maximum(x @ weight.T + bias, 0)
    weight, bias = layers[-1]
    return x @ weight.T + bias
