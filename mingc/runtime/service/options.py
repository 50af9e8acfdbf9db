"""Options of the running model: capacity, batching, devices, caches."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from mingc.errors import ConfigError
from mingc.runtime.encoders.cache import DEFAULT_BYTES
from mingc.runtime.thinker.ranks.rank_group import STEP_TIMEOUT_S
from mingc.runtime.thinker.worker import DEFAULT_STEPS, StepOptions

# What the command line calls the options that it has.
_OPTIONS = {
    "tp": "--tp",
    "max_total_tokens": "--max-total-tokens",
    "max_waiting": "--max-queue",
    "max_speech_seqs": "--max-speech-seqs",
    "talker_devices": "--talker-device",
    "speech_lead": "--speech-lead",
    "num_torch_threads": "--threads",
    "step_timeout_s": "--step-timeout",
    "encoder_cache": "--encoder-cache",
}
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,3})")
_MAY_BE_ZERO = ("max_waiting", "speech_lead", "encoder_cache")
# More than any machine has; beyond it torch's and the clock's numbers end.
_MOST = {
    "max_total_tokens": 1 << 40,
    "speech_lead": 10**6,
    "num_torch_threads": 1024,
    "step_timeout_s": 10**9,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How an artifact is run.

    Attributes:
        tp: ranks of the thinker; None takes what the artifact was exported for, anything else must equal it.
        max_total_tokens: capacity of the thinker's KV pages in tokens, for all requests together; None: chosen
            automatically.
        max_running: requests the thinker works on at once; None is the largest decode batch.
        max_waiting: requests that may wait for the thinker before more are refused.
        max_speech_seqs: segments that each talker generates concurrently; None is its largest batch. Paced speech may
            have more, because each stream takes part in only a few patches.
        talker_devices: `cpu` or `cuda:N` for each talker; none: one talker on the thinker's first device. One of the
            talkers speaks each answer.
        speech_lead: patches that streamed speech may be ahead of its playback; 0: as fast as possible.
        max_prefills_per_patch: segments that may join the talker's batch at one patch boundary.
        max_streams: requests of each talker that may speak or wait to speak before more are refused; at least
            `max_speech_seqs`.
        max_pending_patches: patches a client may leave unread before its speech pauses.
        num_preprocess_threads: threads that decode media and prepare prompts.
        num_torch_threads: CPU threads of an engine; None: on CUDA one, else torch's setting is left alone.
        step_timeout_s: time after which a step of the thinker's ranks counts as hanging, which ends the service.
        check_hashes: read every file of the artifact once and compare its hash before anything is loaded.
        served_model_names: names of the model for clients, the first in responses; none: the name given at export.
        parse_special_tokens: recognise special tokens in the text of requests; otherwise they are plain text.
        steps: which steps the thinker's workers run.
        talker_depth: most patches in flight; None: 2 on a GPU, 1 on a CPU.
        prefix_cache: reuse KV pages of earlier requests for prompts that begin with the same tokens and media, and
            token ids of the same texts.
        encoder_cache: bytes of host memory for embeddings of images, videos and clips that may be reused; 0: none.
        loads_speech: whether the speech stages of the artifact are loaded; otherwise speech is refused.
    """

    tp: int | None = None
    max_total_tokens: int | None = None
    max_running: int | None = None
    max_waiting: int = 128
    max_speech_seqs: int | None = None
    talker_devices: tuple[str, ...] = ()
    speech_lead: int = 3
    max_prefills_per_patch: int = 16
    max_streams: int = 256
    max_pending_patches: int = 128
    num_preprocess_threads: int = 2
    num_torch_threads: int | None = None
    step_timeout_s: float = STEP_TIMEOUT_S
    check_hashes: bool = False
    served_model_names: tuple[str, ...] = ()
    parse_special_tokens: bool = False
    steps: StepOptions = DEFAULT_STEPS
    talker_depth: int | None = None
    prefix_cache: bool = True
    encoder_cache: int = DEFAULT_BYTES
    loads_speech: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"{_OPTIONS.get(field.name, field.name)} is {value}, which is below {least}"
            for field in dataclasses.fields(self)
            for least in (0 if field.name in _MAY_BE_ZERO else 1,)
            if isinstance(value := getattr(self, field.name), int)
            and not isinstance(value, bool)
            and value < least
        ]
        if not 0 < self.step_timeout_s < math.inf:
            problems.append(f"--step-timeout is {self.step_timeout_s}, not a finite number above 0")
        for name, most in _MOST.items():
            if (value := getattr(self, name)) is not None and math.inf > value > most:
                problems.append(f"{_OPTIONS[name]} is {value}, which is above {most}")
        for name in self.talker_devices:
            if not _DEVICE.fullmatch(name):
                problems.append(
                    f"--talker-device {name!r} is neither cpu nor a GPU; write cuda:0 for the first"
                )
            elif name != "cpu" and self.talker_devices.count(name) > 1:
                problems.append(f"--talker-device names {name} more than once; write each GPU once")
        for name in self.served_model_names:
            if not name.strip():
                problems.append("--served-model-name is empty")
            elif not name.isprintable():
                problems.append(f"--served-model-name {name!r} contains characters that cannot be printed")
        if problems:
            raise ConfigError(
                "; ".join(problems), where="options of the engines", fix="see `mingc serve --help`"
            )
