"""Building blocks that a model author calls inside a loss: tensor splits, attention, cross-entropy, dropout."""
