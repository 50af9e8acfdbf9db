"""The stages, one file each, found by name. A file that fails to import is an error, not a missing stage."""

from __future__ import annotations

import importlib
from pathlib import Path

from mingc.errors import ConfigError
from mingc.export.stage import Stage

# Data flows in this order; reports and manifests list stages so.
ORDER = ("vision_encoder", "audio_encoder", "thinker", "talker", "cfm", "audio_vae")


def discover() -> dict[str, Stage]:
    """Every stage by name, known ones in data-flow order, others after them."""
    found = sorted(
        file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in ("__init__", "base")
    )
    names = [name for name in ORDER if name in found] + [name for name in found if name not in ORDER]
    return {name: find(name) for name in names}


def find(name: str) -> Stage:
    """The stage called `name`. Raises ConfigError listing the known ones."""
    folder = Path(__file__).parent
    if name in ("__init__", "base") or not (folder / f"{name}.py").is_file():
        known = sorted(file.stem for file in folder.glob("*.py") if file.stem not in ("__init__", "base"))
        raise ConfigError(f"unknown stage {name}", where="--stages", fix=f"choose from {', '.join(known)}")
    stage: Stage = importlib.import_module(f"mingc.export.stages.{name}").STAGE
    return stage
