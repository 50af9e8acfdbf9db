"""What makes figures wrong without anybody noticing: each trap looks at runs and says what it found, in words."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from mingc.bench.records import Finding, Load, Run, Sample, grouped

# Faster than any model: what comes at this rate was generated before and held back.
_TOKEN_S = 0.0002
_FASTEST_RTF = 0.003
_SAME_MOMENT = 0.02  # of the time of the answer
_LEAST_TOKENS, _LEAST_AUDIO_S = 8, 1.0  # shorter streams show nothing
_RATE_ERROR = 0.02  # between the length of a sound and what is said about it
_SAME_CHARS = 20  # shorter answers may well be equal
_SAME_SHARE = 0.1
_FLAT = 1.15  # of twice the concurrency: less is no gain
_LENGTHS = 1.2  # longest to shortest mean of two loads
_TEMPLATE_TOKENS = 64  # prompts share the beginning of the chat template
_BUSY, _LEAST_LAG_S, _LAG_SHARE = 0.85, 0.005, 0.1
_TOKEN_HITS = re.compile(r"prefix_cache_hit|cached_tokens_total|prefix_cache_hits")
_MEDIA_HITS = re.compile(r"(encoder|mm|media)_cache_hits?(_total)?\b")

Runs = Sequence[Run]
Group = tuple[str, Load, list[Sample], Runs]


def find_traps(runs: Runs) -> tuple[Finding, ...]:
    """All findings, by path and load."""
    groups: list[Group] = [
        (path, load, [each for run in found for each in run.samples if not each.error], found)
        for (path, load), found in grouped(runs).items()
    ]
    found = [
        Finding(trap=name, where=f"{path} {load.label}", message=message)
        for path, load, samples, repeats in groups
        for name, trap in _OF_ONE_LOAD.items()
        for message in trap(samples, repeats)
    ]
    by_path = defaultdict[str, list[Group]](list)
    for group in groups:
        by_path[group[0]].append(group)
    found += [
        Finding(trap=name, where=path, message=message)
        for path, of_path in by_path.items()
        for name, trap_of_path in _OF_ONE_PATH.items()
        for message in trap_of_path(of_path)
    ]
    return tuple(found)


def _failed(samples: Sequence[Sample], runs: Runs) -> Iterator[str]:
    failed = [each for run in runs for each in run.samples if each.error]
    if failed:
        total = len(samples) + len(failed)
        yield f"{len(failed)} of {total} requests failed and are in no other figure: {failed[0].error[:200]}"


def _blob(samples: Sequence[Sample], runs: Runs) -> Iterator[str]:
    """Streams whose parts come together: they were generated before, so the first part is not the first one made."""
    path = runs[0].path
    if path in ("speech", "transcription"):  # may be whole
        return
    early = [each for each in samples if len(each.picture_times) > each.num_pictures]
    late = [each for each in early if _span(each.picture_times) < _SAME_MOMENT * (each.ended - each.sent)]
    if early and 2 * len(late) > len(early):
        yield f"{len(late)} of {len(early)} unfinished pictures came together with the finished one"
    texts = [] if path == "picture" else [each for each in samples if _tokens(each) >= _LEAST_TOKENS]
    lumps = [each for each in texts if _span(each.token_times) < _TOKEN_S * (_tokens(each) - 1)]
    if path != "realtime" and texts and 2 * len(lumps) > len(texts):
        yield (
            f"{len(lumps)} of {len(texts)} streamed texts came in one piece, at {_latest(lumps)} % of the time of the"
            " answer: the time to the first token is that of the last one"
        )
    spoken = [each for each in samples if each.audio_s >= _LEAST_AUDIO_S]
    blobs = [each for each in spoken if _span(each.audio_times) < _FASTEST_RTF * each.audio_s]
    if spoken and 2 * len(blobs) > len(spoken):
        yield (
            f"{len(blobs)} of {len(spoken)} streamed sounds came in one piece after they had been generated: the time"
            " to the first audio is that of the whole sound, and a listener waits for all of it"
        )


def _tokens(sample: Sample) -> int:
    return sample.output_tokens or len(sample.token_times)


def _span(times: Sequence[float]) -> float:
    return times[-1] - times[0] if times else 0.0


def _latest(samples: Sequence[Sample]) -> int:
    shares = [
        (each.token_times[0] - each.sent) / max(each.ended - each.sent, 1e-9)
        for each in samples
        if each.token_times
    ]
    return round(100 * statistics.median(shares)) if shares else 100


def _header(samples: Sequence[Sample], runs: Runs) -> Iterator[str]:
    wrong = [each for each in samples if each.header_rate and each.header_rate != each.sample_rate]
    if wrong:
        says, has = wrong[0].header_rate, wrong[0].sample_rate
        assert says
        yield (
            f"the header says {says} Hz, the voice of the model has {has} Hz: if the samples were not resampled, the"
            f" sound plays {has / says:.2f} × as long as it is; lengths and RTF here count {has} Hz"
        )
        return
    for each in samples:
        stated, seconds = each.stated_audio_s, each.audio_s
        if stated and seconds and abs(seconds / stated - 1) > _RATE_ERROR:
            yield (
                f"the sound of {each.item} has {seconds:.2f} s by its rate ({each.sample_rate} Hz), {stated:.2f} s as"
                f" the server counts them: the ratio is {seconds / stated:.2f}"
            )
            return


def _equal(samples: Sequence[Sample], runs: Runs) -> Iterator[str]:
    same = _largest_group(samples, lambda each: each.digest)
    if same > 1:
        what = "picture" if runs[0].path == "picture" else "sound, sample by sample"
        yield f"{same} different requests got the same {what}: answers are copies, or mixed up"
    if runs[0].path in ("realtime", "transcription"):  # few sentences are spoken: the words may be the same
        return
    texts = _largest_group(samples, lambda each: each.text if len(each.text) >= _SAME_CHARS else "")
    if texts > max(1, _SAME_SHARE * len(samples)):
        yield f"{texts} different prompts got the same text: answers are copies, or mixed up"


def _largest_group(samples: Sequence[Sample], key: Callable[[Sample], str]) -> int:
    items = defaultdict[str, set[str]](set)
    for each in samples:
        if found := key(each):
            items[found].add(each.item)
    return max(map(len, items.values()), default=0)


def _lengths(samples: Sequence[Sample], runs: Runs) -> Iterator[str]:
    """Answers of other lengths than asked; where no length can be asked for, they differ."""
    counts = [each.output_tokens for each in samples if each.output_tokens is not None and each.token_times]
    if not counts or runs[0].path in ("realtime", "transcription"):
        return
    fixed = {each.fixed_tokens for each in samples}
    asked = fixed.pop() if len(fixed) == 1 else None
    low, high = min(counts), max(counts)
    if asked and (low, high) != (asked, asked):
        yield f"answers have {low} to {high} tokens, all were asked for {asked}: the server ignores `ignore_eos`"
    elif asked is None and low != high:
        yield f"no length is fixed: answers have {low} to {high} tokens, so times of whole answers do not compare"


def _cached(samples: Sequence[Sample], runs: Runs) -> Iterator[str]:
    tokens = [each for each in samples if (each.cached_tokens or 0) > _TEMPLATE_TOKENS]
    if tokens:
        most = max(each.cached_tokens or 0 for each in tokens)
        yield f"{len(tokens)} of {len(samples)} prompts came from the server's prefix cache, up to {most} tokens"
    else:
        hits = sum(value for run in runs for name, value in run.counters.items() if _TOKEN_HITS.search(name))
        if samples and hits > _TEMPLATE_TOKENS * len(samples):
            yield f"the server took {hits:g} tokens of {len(samples)} prompts from its prefix cache"
    media = sum(value for run in runs for name, value in run.counters.items() if _MEDIA_HITS.search(name))
    if media:
        yield f"the server did not encode {media:g} pictures or clips again: its cache had them"


def _client(samples: Sequence[Sample], runs: Runs) -> Iterator[str]:
    """The clients were the limit, not the server."""
    fix = "; pass a higher --client-processes, or use a machine with more idle cores"
    busy = max(run.client.busy for run in runs)
    if busy > _BUSY:
        yield f"a client process computed {busy:.0%} of the time: figures are the client's, not the server's{fix}"
        return
    firsts = [each.first_byte - each.sent for each in samples if each.first_byte is not None]
    bound = max(_LEAST_LAG_S, _LAG_SHARE * statistics.median(firsts)) if firsts else _LEAST_LAG_S
    lag = max(run.client.lag_s for run in runs)
    late = sorted(each.sent - each.scheduled for each in samples)
    behind = late[int(0.99 * (len(late) - 1))] if late else 0.0
    if lag > bound:
        yield f"a client process was up to {1e3 * lag:.0f} ms late, so times of arrivals are wrong by as much{fix}"
    elif behind > bound:
        yield f"requests left up to {1e3 * behind:.0f} ms after they were due{fix}"
    if (step := max(run.client.clock_s for run in runs)) > 1e-3:
        yield f"the clock of the clients has steps of {1e3 * step:.0f} ms: shorter times are rounded"


def _flat(groups: Sequence[Group]) -> Iterator[str]:
    """Throughput that does not grow with concurrency: a cap on the batch, or a server that is full."""
    rates = sorted(
        (
            load.concurrency,
            statistics.mean(sum(not each.error for each in run.samples) / run.wall_s for run in runs),
        )
        for _, load, samples, runs in groups
        if load.kind == "closed" and len(samples) >= load.concurrency * len(runs)
    )
    for (few, slow), (many, fast) in itertools.pairwise(rates):
        if many >= 2 * few and fast < _FLAT * slow:
            yield (
                f"{many} clients get {fast:.2f} requests/s, {few} get {slow:.2f}: a cap on concurrent requests, or a"
                " full server; from here on latencies are those of the queue"
            )
            return


def _audio_lengths(groups: Sequence[Group]) -> Iterator[str]:
    means = {
        load.label: statistics.mean(each.audio_s for each in samples if each.audio_s)
        for _, load, samples, _ in groups
        if any(each.audio_s for each in samples)
    }
    if len(means) > 1 and max(means.values()) > _LENGTHS * min(means.values()):
        shown = ", ".join(f"{seconds:.1f} s ({label})" for label, seconds in means.items())
        yield f"the sound of an answer is longer under one load than under another: {shown}; compare per second of it"


def _repeated(groups: Sequence[Group]) -> Iterator[str]:
    """Items that were sent more than once."""
    counts = Counter(each.item for _, _, _, runs in groups for run in runs for each in run.samples)
    again = sum(count > 1 for count in counts.values())
    if again:
        yield f"{again} of {len(counts)} items were sent more than once: the server may have kept their results"


_OF_ONE_LOAD = {
    "failed": _failed,
    "blob": _blob,
    "header": _header,
    "equal": _equal,
    "lengths": _lengths,
    "cache": _cached,
    "client": _client,
}
_OF_ONE_PATH = {"flat": _flat, "lengths": _audio_lengths, "repeated": _repeated}
