"""Convolutional networks whose head is expanded while everything learns.

>>> from fissile.bank import Dense, Expand
>>> arms = {"dense": Dense(), "random": Expand(2)}
>>> trained = train([Network(256, 20, seed=0)], images, arms, device="cuda")
>>> trained[0]["random"].accuracy[-1]
"""

from fissile.bank.vision.convnet import ConvNet, Images
from fissile.bank.vision.train import Network, Trained, train

__all__ = ["ConvNet", "Images", "Network", "Trained", "train"]
