"""What every peer of `cargo xtask bench` written in Python shares: cases read, answers printed (README.md beside)."""

import json
import os
import random
import re
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`PROMPT+TOKENSxN`: N requests at once, each of PROMPT drawn tokens and TOKENS of answer."""

    prompt_tokens: int
    tokens: int
    at_once: int

    @staticmethod
    def parse(text):
        found = re.fullmatch(r"(\d+)\+(\d+)(?:x(\d+))?", text.strip())
        if not found:
            sys.exit(f"no case: {text!r}")
        prompt_tokens, tokens, at_once = (int(number or 1) for number in found.groups())
        return Case(prompt_tokens, tokens, at_once)

    def prompts(self, vocabulary):
        """New tokens each time, so that no prefix cache helps."""
        return [[random.randrange(vocabulary) for _ in range(self.prompt_tokens)] for _ in range(self.at_once)]


class Arrivals:
    """When the tokens of each request came, since the requests were made."""

    def __init__(self):
        self.begun = time.perf_counter()
        self.of = {}

    def came(self, request, tokens):
        """`tokens` of a request are there by now."""
        if tokens > 0:
            now = time.perf_counter() - self.begun
            first, _, _ = self.of.get(request, (now, now, 0))
            self.of[request] = (first, now, tokens)

    def round(self, case):
        everyone = sorted(self.of.values())
        generated = sum(tokens for _, _, tokens in everyone)
        if len(everyone) != case.at_once or generated != case.tokens * case.at_once:
            sys.exit(f"{len(everyone)} requests got {generated} tokens, {case} was asked")
        last_first = max(first for first, _, _ in everyone)
        end = max(last for _, last, _ in everyone)
        decode = sum((tokens - 1) / max(last - first, 1e-9) for first, last, tokens in everyone)
        return {
            "first_token_s": everyone[len(everyone) // 2][0],
            "prefill_tokens_per_s": case.prompt_tokens * case.at_once / last_first,
            "decode_tokens_per_s": decode if case.tokens > 1 else None,
            "end_to_end_tokens_per_s": generated / end,
        }


def peak_rss_bytes():
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def keep_standard_output():
    """Where answers go; from now on, what is printed goes to standard error. For before the import of libraries, which
    print what they like."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers, run):
    """`ready`, then what `run(case)` (a round) says of each case that comes on standard input."""
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        answer = {"round": run(Case.parse(line)), "peak_rss_bytes": peak_rss_bytes()}
        print(json.dumps(answer), file=answers, flush=True)
