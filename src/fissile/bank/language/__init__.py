"""Small language models of one shape trained together.

>>> found = train(Shape(65, neurons=16), range(5), text, {"dense": (Dense(), "magnitude")})
"""

from fissile.bank.language.gpt import GPT, Shape
from fissile.bank.language.train import Networks, Text, Trained, joined, train

__all__ = ["GPT", "Networks", "Shape", "Text", "Trained", "joined", "train"]
