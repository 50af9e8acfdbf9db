"""imagegen/*.safetensors: forwards of the sampler, whole loops as a server runs them, and the VAE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conformance.engines import Engines
from conformance.reference_log import ReferenceLog
from mingc.artifacts.parameters import ImageDitParameters, ImageVaeParameters
from mingc.runtime.images.engines import ImageEngines
from mingc.runtime.images.schedule import noise_levels
from mingc.runtime.images.tokens import TokenLayout, to_latents, to_tokens, token_layout
from mingc.runtime.images.worker import Drawing, ImageWorker, PicturePrompt, PreparedDrawing
from mingc.verify.engine_run import to_numpy

STAGES = ("image_condition", "image_dit", "image_vae")
_MAX_OFF = 1e-3  # share of the bytes of a picture that may differ, by 1


def replay_velocities(engines: Engines, log: ReferenceLog, _: Mapping[str, Any]) -> None:
    """Replay single forwards of the sampler, each with its caption branch."""
    pictures = _image_engines(engines)
    patch = pictures.parameters.patch_size
    for case in log.cases("out"):
        with log.case(case):
            caption = pictures.sampler.caption(_tensor(engines, log, f"{case}.caption"))
            frames = [_tensor(engines, log, f"{case}.latent")]
            if f"{case}.ref_latent" in log:
                frames.append(_tensor(engines, log, f"{case}.ref_latent"))
            height, width = frames[0].shape[2:]
            layout = _layout(pictures, (height, width), len(frames), len(caption))
            given = torch.cat([to_tokens(frame.transpose(0, 1), patch) for frame in frames], dim=1)
            tokens = given.new_zeros(1, len(layout.is_pad), given.shape[2])
            tokens[:, : given.shape[1]] = given
            found = pictures.sampler.velocity(tokens, caption[None], layout, float(log.input(f"{case}.t")[0]))
            velocity = to_latents(found[:, : layout.num_noisy], patch, (height, width))
            log.tensor(f"{case}.out", to_numpy(velocity).transpose(1, 0, 2, 3))


def replay_loops(engines: Engines, log: ReferenceLog, document: Mapping[str, Any]) -> None:
    """Replay loops step by step with the server's worker, from recorded captions, and decode their pictures."""
    captions: Mapping[str, NDArray[np.generic]] = document["inputs"]
    for case, arguments in document["loops"].items():
        with log.case(case):
            _replay_loop(case, engines, log, arguments, captions[arguments["caption"].partition(": ")[2]])
    for case, arguments in document["e2e"].items():
        height, width = arguments["diffusion_size"]
        rows = captions[f"{_E2E_CAPTIONS[case]}.caption"]
        with log.case(case):
            size = {"height": height, "width": width, "scheduler": "shipped"}
            _replay_loop(case, engines, log, {**arguments, **size}, rows)


_E2E_CAPTIONS = {"e2e_t2i": "glyph", "e2e_edit": "edit"}


def replay_decoding(engines: Engines, log: ReferenceLog, _: Mapping[str, Any]) -> None:
    """Replay decoding and encoding; a picture at a time, as a server does."""
    pictures = _image_engines(engines)
    for case in log.cases("image"):
        with log.case(case):
            latents = _tensor(engines, log, f"{case}.latent")
            log.tensor(f"{case}.image", np.stack([to_numpy(pictures.decode(each)) for each in latents]))
    for case in log.cases("pixels"):
        with log.case(case):
            pixels = _tensor(engines, log, f"{case}.pixels")
            log.tensor(f"{case}.latent", np.stack([to_numpy(pictures.encode(each)) for each in pixels]))


def _replay_loop(
    case: str, engines: Engines, log: ReferenceLog, arguments: Mapping[str, Any], rows: NDArray[np.generic]
) -> None:
    parameters = engines.parameters_of("image_dit", ImageDitParameters)
    if arguments["scheduler"] != "shipped":
        parameters = replace(parameters, is_shift_dynamic=arguments["scheduler"]["use_dynamic_shifting"])
    worker = ImageWorker(_image_engines(engines, parameters))
    reference = f"{case}.ref_latent"
    drawing = Drawing(
        size=(arguments["height"], arguments["width"]),
        num_steps=arguments["steps"],
        guidance=arguments["guidance"],
        prompt=PicturePrompt(residual=torch.zeros(0), delta=torch.zeros(0)),  # the caption is recorded
        reference=np.zeros(0, np.uint8) if reference in log else None,
    )
    batch = worker.begin(_prepared(worker, drawing, rows, log, reference), [arguments["seed"]])
    if f"{case}.sigmas" in log:
        log.tensor(f"{case}.sigmas", batch.prepared.levels, tolerance=1e-6)
    log.tensor(f"{case}.noise", worker.latents(batch, 0)[None], tolerance=0.0)
    latents = []
    while not batch.is_finished:
        worker.step(batch)
        latents.append(worker.latents(batch, 0))
    if f"{case}.latents" in log:
        # The last of several steps changes nothing and is not run.
        latents += latents[-1:] * (arguments["steps"] - len(latents))
        log.tensor(f"{case}.latents", np.stack(latents)[:, None])
    log.tensor(f"{case}.final_latent", latents[-1][None])
    pixels = worker.engines.decode(torch.from_numpy(latents[-1]).to(engines.device))
    log.tensor(f"{case}.decoded", to_numpy(pixels)[None])
    picture, recorded = worker.decode(batch, 0), log.references[f"{case}.image"]
    if picture.shape != recorded.shape:
        log.skip(f"{case}.image", "the recorded picture has its final size")
    elif log.is_exact:
        off = np.abs(picture.astype(np.int64) - recorded.astype(np.int64))
        share = float((off > 0).mean())
        log.rule(
            f"{case}.image",
            off.max() <= 1 and share < _MAX_OFF,
            f"{share:.1e} of the bytes differ, by {off.max()}",
        )


def _prepared(
    worker: ImageWorker, drawing: Drawing, rows: NDArray[np.generic], log: ReferenceLog, reference: str
) -> PreparedDrawing:
    """As `ImageWorker.prepare`, with the caption's rows (1, L, C) and the reference's latents of the file."""
    engines, parameters = worker.engines, worker.engines.parameters
    caption = torch.from_numpy(rows[0].astype(np.float32)).to(engines.device)
    given = [caption, torch.zeros_like(caption)][: drawing.num_samples]
    embedded = torch.stack([engines.sampler.caption(each) for each in given])
    latents = (drawing.size[0] // engines.vae.scale, drawing.size[1] // engines.vae.scale)
    layout = _layout(engines, latents, drawing.num_frames, embedded.shape[1])
    frame = None
    if drawing.reference is not None:
        value = torch.from_numpy(log.input(reference).astype(np.float32)).transpose(0, 1)
        frame = to_tokens(value, parameters.patch_size)[0].to(engines.device)
    return PreparedDrawing(
        drawing=drawing,
        captions=embedded,
        reference=frame,
        layout=layout,
        levels=noise_levels(parameters, drawing.num_steps, layout.num_noisy),
    )


def _layout(engines: ImageEngines, size: tuple[int, int], frames: int, caption: int) -> TokenLayout:
    return token_layout(engines.parameters, size, frames, caption).to(engines.device)


def _image_engines(engines: Engines, parameters: ImageDitParameters | None = None) -> ImageEngines:
    """The engines as a server calls them."""
    return ImageEngines(
        engines.stage("image_condition"),
        engines.stage("glyph") if engines.has("glyph") else None,
        engines.stage("image_dit"),
        engines.stage("image_vae"),
        parameters=parameters or engines.parameters_of("image_dit", ImageDitParameters),
        vae=engines.parameters_of("image_vae", ImageVaeParameters),
        device=engines.device,
    )


def _tensor(engines: Engines, log: ReferenceLog, name: str) -> Tensor:
    return torch.from_numpy(log.input(name).astype(np.float32)).to(engines.device)
