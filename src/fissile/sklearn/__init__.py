"""A classifier for scikit-learn that spends a budget of non-zero parameters by splitting neurons.

>>> from fissile.sklearn import FissileClassifier
>>> FissileClassifier(nonzeros=20_000).fit(X, y).score(X_test, y_test)
"""

from fissile._common.errors import needs

needs("sklearn", "sklearn")

from fissile.sklearn.classifier import FissileClassifier  # noqa: E402

__all__ = ["FissileClassifier"]
