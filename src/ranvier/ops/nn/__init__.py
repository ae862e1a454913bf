"""Layers of neural networks: contractions, pooling, normalisation, recurrence, attention, images, signals."""
