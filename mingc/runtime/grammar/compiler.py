"""Compiles constraints into matchers, after a process with limits has done the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import signal
import subprocess
import threading
from collections import OrderedDict

from mingc.errors import CapacityError, WorkerError
from mingc.prompts.tokenizer import TextTokenizer
from mingc.python_module import module_command, module_environment
from mingc.runtime.grammar.check_process import CPU_SECONDS, MAX_BYTES
from mingc.runtime.grammar.grammars import grammar_text, unsupported
from mingc.runtime.grammar.matcher import GrammarMatcher, brief
from mingc.runtime.grammar.vocabulary import Grammars, Vocabulary
from mingc.runtime.request import Constraint

log = logging.getLogger("mingc.preprocess")

_MAX_CHECKED = 4096
_PATIENCE_S = 30.0  # for a process that gets no CPU time


class GrammarCompiler:
    """Compiles for one tokenizer. Several threads may call `compile`."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, stop_ids: tuple[int, ...]) -> None:
        vocabulary = Vocabulary.of(tokenizer, vocab_size, stop_ids)
        self._vocabulary = vocabulary.to_json()  # 3 MB of 157,184 tokens
        self._grammars = Grammars(vocabulary, tokenizer.encode_plain)
        self._checked: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()  # of the process and of `_checked`
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def compile(self, constraint: Constraint, count: int = 1) -> list[GrammarMatcher]:
        """A matcher for each of `count` answers. Takes a few ms, up to a second for what is refused.

        Raises: RequestError when the constraint is invalid, unsupported or too complex; CapacityError after `close`.
        """
        grammar = grammar_text(constraint)
        digest = hashlib.sha256(grammar.encode()).digest()
        with self._lock:
            is_known = digest in self._checked
            error = "" if is_known else self._check(grammar)
            if not error:
                self._checked[digest] = None
                self._checked.move_to_end(digest)
                if len(self._checked) > _MAX_CHECKED:
                    self._checked.popitem(last=False)
        if not error:
            matcher = self._grammars.matcher(grammar)
            matcher.compute_bitmask()  # fills caches that the thinker's thread would fill
            error = matcher.get_error()
        if error:
            raise unsupported(constraint, f"cannot be used: {brief(error)}")
        return [GrammarMatcher(matcher, constraint) for _ in range(count)]

    def close(self) -> None:
        """End the process; a thread that waits for it gets an error."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """Id of the process, which the first constraint starts."""
        return None if self._process is None else self._process.pid

    def _check(self, grammar: str) -> str:
        """What the process finds wrong with a grammar; "" for nothing."""
        if self._is_closed:
            raise CapacityError("the server is stopping", code="stopping")
        if self._process is None:
            self._process = self._start()
            if self._ask(self._process, self._vocabulary) is None:
                code = self._end()
                raise WorkerError(f"the process that checks grammars ended with code {code} while it started")
        found = self._ask(self._process, json.dumps(grammar))
        if found is not None:
            return found
        code = self._end()
        if self._is_closed:
            raise CapacityError("the server is stopping", code="stopping")
        if code == -signal.SIGPROF:
            return f"compiling it takes more than {CPU_SECONDS:g} s"
        if code in (-signal.SIGKILL, 0):
            raise WorkerError("the process that checks grammars was killed", fix="send the request again")
        return f"compiling it takes more than {MAX_BYTES >> 20} MiB, or crashes the compiler"

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            module_command("mingc.runtime.grammar.check_process"),
            env=module_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )

    def _ask(self, process: subprocess.Popen[str], line: str) -> str | None:
        """Send a line. Returns the reply; None when the process has ended."""
        assert process.stdin is not None and process.stdout is not None, "it has pipes"
        watch = threading.Timer(_PATIENCE_S, process.kill)
        watch.start()
        try:
            print(line, file=process.stdin, flush=True)
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        finally:
            watch.cancel()
        return json.loads(reply) if reply else None

    def _end(self) -> int:
        """End the process. Returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.0 if self._is_closed else 1.0)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "it has pipes"
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return process.returncode
