"""Fixtures for every folder of tests."""

from __future__ import annotations

import gc
import signal
import ssl
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from eager_export import export_eager, joined
from hypothesis import settings
from image_checkpoint import lay_image_checkpoint
from restored_logging import restored_logging


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws other examples in every run: few in each, unless exhaustive tests run as well."""
    examples = 30 if config.option.markexpr == "not exhaustive" else 100
    settings.register_profile(
        "mingc", deadline=None, max_examples=examples
    )  # no test depends on the machine's speed
    settings.load_profile("mingc")


EXPORTED = {
    "artifact",
    "compiled_artifact",
    "eager_artifact",
    "image_artifact",
    "synthetic_thinker_artifact",
    "two_rank_artifact",
    "wide_thinker_artifact",
}


# A job that a shell starts with `&` ignores SIGINT, and its children inherit that. Tests interrupt such children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each HTTP client would read all certificates again, which takes a twentieth of the time of all tests.
ssl.create_default_context = cache(ssl.create_default_context)

# Modules and test items live as long as the process, and there are millions of objects in them: looking for garbage
# among them again and again would take a third of the time of collecting tests, and a tenth of that of running them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit what differs from the usual: the first test of an artifact waits for its export, GPU kernels are compiled.

    An export has a limit of its own, so only the tests themselves are limited.
    """
    for item in items:
        if item.get_closest_marker("timeout") is not None:
            continue
        if EXPORTED & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.timeout(240, func_only=True))
        elif item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module", autouse=True)
def _logging_of_a_module_ends_with_it() -> Iterator[None]:
    """Or a server's limit on repeated lines changes what later modules see of their logs."""
    with restored_logging():
        yield


@pytest.fixture(scope="session")
def eager_artifact() -> Path:
    """All stages of the tiny checkpoint, one rank, float32 on the CPU, nothing compiled. Not to be written into."""
    return export_eager()


@pytest.fixture(scope="session")
def compiled_artifact() -> Path:
    """As `eager_artifact`, with graphs compiled that are hard to compile (tests/support/partly)."""
    stages = ("--stages", "audio_encoder,vision_encoder,thinker,talker")
    # First, while another process exports the other stages.
    compiled = export_eager(*stages, backend="partly")
    return joined(export_eager(), compiled)


@pytest.fixture(scope="session")
def image_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with the folders of image generation. Links: not to be written into."""
    return lay_image_checkpoint(tmp_path_factory.mktemp("images") / "tiny-ming")


@pytest.fixture(scope="session")
def image_artifact(eager_artifact: Path, image_checkpoint: Path) -> Path:
    """As `eager_artifact`, with the stages that draw."""
    stages = ("--stages", "glyph,image_condition,image_dit,image_vae")
    return joined(eager_artifact, export_eager(*stages, checkpoint=image_checkpoint))
