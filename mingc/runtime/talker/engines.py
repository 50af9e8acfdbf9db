"""Talker engines: run the three speech stages (talker, cfm, audio_vae) on the state of all slots.

`TalkerWorker` calls them with prompts and patches; `PatchPipeline` orders the networks of a patch. A slot holds the
device state of one running segment: KV rows, the hidden state that conditions its next patch, the previous latents,
and the VAE's ring buffers. Padding rows of a batch use slot 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mingc.artifacts.parameters import CfmParameters
from mingc.dtypes import torch_dtype
from mingc.runtime.engines.cuda_graphs import GraphPool, GraphRunner, Shapes
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.talker.patch_pipeline import LaunchedPatch, PatchPipeline, patch_shapes

_ALIGNMENT = 16  # bytes; engines copy inputs with a smaller alignment
_META = torch.device("meta")


class TalkerEngines:
    """Runs prompts and patches. On CUDA the constructor captures every size, and calls replay them.

    Args:
        talker, cfm, audio_vae: stages with the graphs `prefill`/`step`, `sample`, `stream`.
        num_slots: slots to allocate, including slot 0 (padding).
        is_captured: None: on CUDA, if all engines can be captured.
    """

    def __init__(
        self,
        talker: LoadedStage,
        cfm: LoadedStage,
        audio_vae: LoadedStage,
        *,
        hidden_size: int,
        flow: CfmParameters,
        num_slots: int,
        device: torch.device,
        is_captured: bool | None = None,
    ) -> None:
        self.device = device
        self._flow = flow
        self._prefill, self._step = talker["prefill"], talker["step"]
        self._sample, self._stream = cfm["sample"], audio_vae["stream"]
        self._talker_state, self._rows = _allocate_rows(talker, num_slots, device)
        self._vae_state = audio_vae.allocate_state({"S": num_slots}, device)
        hidden = self._sample.spec.input("hidden")
        embeds = self._prefill.spec.input("embeds")
        self.embed_dtype = torch_dtype(embeds.dtype)
        self._hidden = torch.zeros(num_slots, hidden_size, dtype=torch_dtype(hidden.dtype), device=device)
        self._history = torch.zeros(num_slots, flow.history_latents, flow.latent_dim, device=device)
        # All networks of a patch run at the same batch size.
        graphs = (self._sample, self._step, self._stream)
        sizes = sorted(set.intersection(*(set(graph.spec.dim("B").buckets) for graph in graphs)))
        largest = next((size for size in sizes if size >= num_slots - 1), sizes[-1])
        self.batch_sizes = [size for size in sizes if size <= largest]
        self.chunk_sizes = sorted(self._prefill.spec.dim("T").buckets)
        self.max_prompts = self._prefill.spec.input("slots").shape_at({})[0]  # of one call
        self._is_captured = (
            device.type == "cuda" and all(graph.is_capturable for graph in (*graphs, self._prefill))
            if is_captured is None
            else is_captured
        )
        self._patches = PatchPipeline(
            self,
            self.batch_sizes,
            num_steps=flow.num_steps,
            patch=(flow.latents_per_patch, flow.latent_dim),
            device=device,
            is_captured=self._is_captured,
        )
        pool = GraphPool(device) if self._is_captured else None
        # The largest size first, so that the others reuse its memory.
        self._prompts = {
            size: GraphRunner(
                self.prompt_shapes(size),
                self._prompt,
                device=device,
                pool=pool,
                name=f"prompts of {size} tokens",
            )
            for size in reversed(self.chunk_sizes)
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all slots."""
        state = (self._rows, *self._vae_state.values(), self._hidden, self._history)
        return sum(each.nbytes for each in state)

    def launch(self, size: int, inputs: Mapping[str, Tensor]) -> LaunchedPatch:
        """Launch one patch of `size` rows after all prompts that were launched so far. See `PatchPipeline.launch`."""
        return self._patches.launch(size, inputs)

    def run_prompts(self, size: int, inputs: Mapping[str, Tensor]) -> None:
        """Prefill a chunk of `size` tokens of several prompts; store last hidden states and history in their slots.

        Inputs: the inputs of the graph `prefill`, and history (R, H, C). Rows of `slots` without a prompt are 0.
        """
        self._prompts[size](inputs)

    def patch_shapes(self, size: int) -> Shapes:
        """Inputs of `launch`."""
        return patch_shapes(size, self._flow.num_steps, (self._flow.latents_per_patch, self._flow.latent_dim))

    def prompt_shapes(self, size: int) -> Shapes:
        """Inputs of `run_prompts`. `embeds` count only where `use_embed` is set."""
        return {
            "input_ids": (torch.int64, (size,)),
            "embeds": (self.embed_dtype, (size, self._hidden.shape[1])),
            "use_embed": (torch.bool, (size,)),
            "segment": (torch.int64, (size,)),
            "index": (torch.int64, (size,)),
            "slots": (torch.int64, (self.max_prompts,)),
            "last": (torch.int64, (self.max_prompts,)),
            "history": (torch.float32, (self.max_prompts, *self._history.shape[1:])),
        }

    def read_rows(self, slot: int, count: int) -> Tensor:
        """Copy the first `count` KV rows of a slot, (states, count, …)."""
        return self._rows[:, slot, :count].clone()

    def write_rows(self, slot: int, rows: Tensor) -> None:
        """Write the first KV rows of a slot."""
        self._rows[:, slot, : rows.shape[1]].copy_(rows)

    def sample(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `PatchModel`."""
        slots = inputs["slots"]
        sampled = self._sample.run(
            hidden=self._hidden.index_select(0, slots),
            history=self._history.index_select(0, slots),
            **{name: inputs[name] for name in ("noise", "step_noise", "guidance", "sigma", "temperature")},
        )
        self._history.index_copy_(0, slots, sampled["next_history"])
        return sampled

    def decode(self, latents: Tensor, slots: Tensor, patch_index: Tensor) -> Tensor:
        """See `PatchModel`."""
        decoded = self._stream.run(latents=latents, slots=slots, patch_index=patch_index, **self._vae_state)
        return decoded["samples"]

    def advance(self, sampled: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        """See `PatchModel`."""
        slots = inputs["step_slots"]
        stepped = self._step.run(
            embeds=sampled["next_embeds"], slots=slots, lengths=inputs["lengths"], **self._talker_state
        )
        self._hidden.index_copy_(0, slots, stepped["hidden"])

    def _prompt(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        given = {name: value for name, value in inputs.items() if name != "history"}
        hidden = self._prefill.run(**given, **self._talker_state)["hidden"]
        self._hidden.index_copy_(0, inputs["slots"], hidden)
        self._history.index_copy_(0, inputs["slots"], inputs["history"])
        return ()


def _allocate_rows(
    talker: LoadedStage, num_slots: int, device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """Allocate the KV rows of all layers as zeros: slices by name, and the whole tensor (states, slots, rows, …).

    With one tensor, the rows of a slot are copied at once; 48 single copies take the host 0.2 ms per segment.
    """
    names = sorted(talker.state_specs())
    one = {
        tuple(state.shape): state.dtype for state in talker.allocate_state({"S": num_slots}, _META).values()
    }
    ((shape, dtype),) = one.items()
    rows = torch.zeros(len(names), *shape, dtype=dtype, device=device)
    assert rows.stride(0) * rows.itemsize % _ALIGNMENT == 0, (
        "a misaligned state would be copied by the engine"
    )
    return dict(zip(names, rows, strict=True)), rows
