"""The method: split neurons, prune back to the budget, put the new layers into a model."""
