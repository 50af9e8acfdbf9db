"""Options of the running model: capacity, batching, devices, caches. No torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mingc.options import BYTES, MOST_BYTES, MOST_SECONDS, SECONDS, check, option
from mingc.runtime.thinker.step_options import DEFAULT_STEPS, STEP_TIMEOUT_S, StepOptions
from mingc.text.spoken import SPEECH_TEXTS

_DEVICE = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,3})")
# No machine has so much; the numbers of torch end beyond.
_MOST_TOKENS = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How an artifact is run, validated on construction. Options without a flag are for Python and Ray Serve."""

    tp: int | None = option(
        None, "--tp", least=1, most=1024, group="Thinker", shown_default="the artifact's",
        help="Ranks of the thinker; refused unless the artifact has that many.",
    )  # fmt: skip
    max_waiting: int = option(
        128,
        "--max-queue",
        least=0,
        most=10**6,
        group="Thinker",
        help="Chats that may wait for the thinker, and requests that may wait to be drawn, before a 503.",
    )
    max_total_tokens: int | None = option(
        None, "--max-total-tokens", least=1, most=_MOST_TOKENS, group="Thinker", shown_default="by free memory",
        help="Capacity of the KV pages of all requests together, in tokens.",
    )  # fmt: skip
    prefix_cache: bool = option(
        True, "--prefix-cache/--no-prefix-cache", group="Thinker",
        help="Reuse KV pages of earlier requests for prompts that begin with the same tokens and media, and token ids "
        "of the same texts.",
    )  # fmt: skip
    step_timeout_s: float = option(
        STEP_TIMEOUT_S, "--step-timeout", unit=SECONDS, above=0, most=MOST_SECONDS, group="Thinker",
        help="Time that a thinker step may take before its ranks count as lost, which ends the server.",
    )  # fmt: skip
    max_speech_seqs: int | None = option(
        None, "--max-speech-seqs", least=1, most=10_000, group="Speech",
        shown_default="twice the talker's largest batch",
        help="Speech segments that each talker generates at the same time. With --speech-lead it may exceed a batch, "
        "because each stream takes part in only a few patches. At most a batch, and three quarters, are of speech that "
        "is not streamed.",
    )  # fmt: skip
    talker_devices: tuple[str, ...] = option(
        (), "--talker-device", group="Speech", metavar="DEVICE,…", shown_default="the first device of the thinker",
        help="Device of each talker, such as cuda:2,cuda:3; one talker speaks each answer.",
    )  # fmt: skip
    image_devices: tuple[str, ...] = option(
        (), "--image-device", group="Model", metavar="DEVICE,…", shown_default="the first device of the thinker",
        help="Device that draws pictures, such as cuda:0; with a second one, such as cuda:0,cuda:1, each computes one "
        "half of the guidance.",
    )  # fmt: skip
    speech_lead: int = option(
        3, "--speech-lead", least=0, most=10**6, group="Speech",
        help="Patches of 0.32 s that streamed speech may be ahead of its playback; 0: no limit. A request may have its "
        "own `speech_lead`.",
    )  # fmt: skip
    voices_dir: Path | None = option(
        None, "--voices-dir", group="Speech",
        help="Keep voices that clients upload in this folder, which several servers may share; without it they are "
        "refused.",
    )  # fmt: skip
    speech_text: str = option(
        "natural", "--speech-text", choices=SPEECH_TEXTS, group="Speech",
        help="How texts are read: natural reads English and Chinese as a person does, reference follows the rules of "
        "the official code.",
    )  # fmt: skip
    # 512 MiB: 256 images of 1,024 patches, or 85 clips of 30 s, at the released dims.
    encoder_cache: int = option(
        512 << 20, "--encoder-cache", unit=BYTES, least=0, most=MOST_BYTES, group="Media",
        help="Host memory that keeps embeddings of images, videos and clips for reuse; 0: none.",
    )  # fmt: skip
    num_torch_threads: int | None = option(
        None, "--threads", least=1, most=1024, group="Model", shown_default="1 on CUDA, else torch's choice",
        help="CPU threads of an engine.",
    )  # fmt: skip
    served_model_names: tuple[str, ...] = option(
        (), "--served-model-name", repeats=True, group="Model", metavar="NAME", shown_default="the artifact's",
        help="Name of the model for clients; may be given several times, the first appears in responses.",
    )  # fmt: skip
    parse_special_tokens: bool = option(
        False, "--parse-special-tokens", group="Model",
        help="Recognise special tokens in the text of requests, for clients that may write roles and turns; otherwise "
        "they are plain text.",
    )  # fmt: skip
    check_hashes: bool = option(
        False,
        "--check-hashes/--no-check-hashes",
        group="Checks before serving",
        help="Compare the hash of every file before the service is ready.",
    )
    loads_speech: bool = option(
        True, help="Load the speech stages of the artifact; without them speech is refused."
    )
    max_running: int | None = option(
        None,
        least=1,
        most=10**6,
        shown_default="the largest decode batch",
        help="Requests in the thinker's batch at most.",
    )
    max_prefills_per_patch: int = option(
        16, least=1, most=10**6, help="Segments that may join the talker's batch at one patch boundary."
    )
    max_streams: int = option(
        256, least=1, most=10**6,
        help="Requests of each talker that may speak or wait to speak before more are refused; at least "
        "max_speech_seqs.",
    )  # fmt: skip
    max_pending_patches: int = option(
        128, least=1, most=10**6, help="Patches that a client may leave unread before its speech pauses."
    )
    num_preprocess_threads: int = option(
        max(2, min(8, (os.cpu_count() or 1) // 4)),
        least=1,
        most=1024,
        shown_default="a quarter of the processors, 2 to 8",
        help="Threads that decode media and prepare prompts; each has a decoder process.",
    )
    talker_depth: int | None = option(
        None, least=1, most=1024, shown_default="2 on a GPU, 1 on a CPU", help="Patches in flight at most."
    )
    steps: StepOptions = DEFAULT_STEPS  # which steps the thinker's workers run

    def __post_init__(self) -> None:
        problems = []
        for flag, names in (("--talker-device", self.talker_devices), ("--image-device", self.image_devices)):
            for name in names:
                if not _DEVICE.fullmatch(name):
                    problems.append(f"{flag} {name}: is neither cpu nor a GPU; write cuda:0 for the first")
                elif name != "cpu" and names.count(name) > 1:
                    problems.append(f"{flag} {name}: is named twice; name each GPU once")
        if len(self.image_devices) > 2:
            problems.append(f"--image-device {','.join(self.image_devices)}: names more than two devices")
        for name in self.served_model_names:
            if not name.strip():
                problems.append("--served-model-name: is empty")
            elif not name.isprintable():
                problems.append(f"--served-model-name {name!r}: contains characters that cannot be printed")
        check(self, *problems, where="options of the engines", fix="see `mingc serve --help`")
