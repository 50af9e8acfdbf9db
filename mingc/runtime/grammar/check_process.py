"""Process that compiles clients' grammars before the server does, with limits that the kernel enforces.

`python -m mingc.runtime.grammar.check_process` starts it. Some schemas of a hundred characters keep the compiler busy
for ever, or take all memory; nothing can end a thread that compiles one. The process reads lines of JSON, first its
vocabulary and then grammars, and answers each with a line: what is wrong with it. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from mingc.runtime.grammar.vocabulary import Grammars, Vocabulary

CPU_SECONDS = 1.0  # for one grammar; ordinary ones take a few ms
MAX_BYTES = 128 << 20  # beside the vocabulary


def main() -> None:
    # A terminal sends these signals to the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    vocabulary = Vocabulary.from_json(sys.stdin.readline())
    bytes_to_tokens = {token: index for index, token in reversed([*enumerate(vocabulary.tokens)])}
    by_byte = [bytes_to_tokens.get(bytes([byte]), 0) for byte in range(256)]
    grammars = Grammars(vocabulary, lambda text: [by_byte[byte] for byte in text.encode()])
    del vocabulary, bytes_to_tokens
    with open("/proc/self/statm", "rb") as file:
        data_bytes = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + MAX_BYTES, data_bytes + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _reply("")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
        error = grammars.first_mask_error(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(error)


def _reply(error: str) -> None:
    sys.stdout.write(json.dumps(error) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
