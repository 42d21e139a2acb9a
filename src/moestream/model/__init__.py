"""Models: reading a GGUF's header and listing where every expert is. Importing this is cheap."""

from moestream.model.architecture import check_architecture, known_architecture
from moestream.model.locate import locate
from moestream.model.read import read_model
from moestream.model.types import Bank, ExpertTensor, Model, Shard, Tensor

__all__ = [
    "Bank",
    "ExpertTensor",
    "Model",
    "Shard",
    "Tensor",
    "check_architecture",
    "known_architecture",
    "locate",
    "read_model",
]
