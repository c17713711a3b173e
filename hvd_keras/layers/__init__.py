"""Layers for models that do not fit on one rank."""

from hvd_keras.layers.embedding import Embedding
from hvd_keras.layers.embedding_group import Embeddings

__all__ = ["Embedding", "Embeddings"]
