"""The part of TensorRT for RTX that builds: it takes every model, and its plan names the cards it was built for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__version__ = "1.7.1"


class ILogger:
    Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=2)


class NetworkDefinitionCreationFlag:
    pass


class BuilderFlag:
    TF32 = "TF32"


class LayerType:
    ATTENTION_INPUT = "attention"


class ComputeCapability:
    SM75, SM80, SM86, SM89, SM120, SM121 = "SM75", "SM80", "SM86", "SM89", "SM120", "SM121"


class OnnxParser:
    def __init__(self, network: Any, logger: ILogger) -> None:
        pass

    def parse(self, model: bytes) -> bool:
        return bool(model)


class _Config:
    def __init__(self) -> None:
        self.num_compute_capabilities = 0
        self.cards: dict[int, str] = {}

    def clear_flag(self, flag: str) -> None:
        pass

    def set_compute_capability(self, name: str, index: int) -> None:
        self.cards[index] = name

    def add_optimization_profile(self, profile: Any) -> None:
        pass


class Builder:
    def __init__(self, logger: ILogger) -> None:
        pass

    def create_network(self, flags: int) -> Any:
        return SimpleNamespace(num_layers=0)

    def create_builder_config(self) -> _Config:
        return _Config()

    def create_optimization_profile(self) -> Any:
        return SimpleNamespace(set_shape=lambda name, *shapes: None)

    def build_serialized_network(self, network: Any, config: _Config) -> bytes:
        return ",".join(config.cards.values()).encode()
