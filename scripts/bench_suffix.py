"""Times suffix decoding's drafts on the host, in Python and in C: microseconds of the processor for each token and each draft.

    python scripts/bench_suffix.py

Texts are made of phrases that come again and again, so that places to compare are found. Finished answers fill a fifth of what is kept of them.
"""

from __future__ import annotations

import random
import time

from pagerunner.config import SpeculativeConfig
from pagerunner.ops.native.suffix import new_index
from pagerunner.sched.suffix import SuffixDrafter, SuffixIndex

TOKENS, STEPS, MOST = 1_000, 20, 8


def phrases(rng: random.Random) -> list[list[int]]:
    """What texts repeat: 300 runs of 5 to 40 tokens, of which few are frequent."""
    return [[int(rng.paretovariate(0.7)) % 50_000 for _ in range(rng.randint(5, 40))] for _ in range(300)]


def text(rng: random.Random, known: list[list[int]], count: int) -> list[int]:
    """Half of it phrases."""
    found: list[int] = []
    while len(found) < count:
        found += rng.choice(known) if rng.random() < 0.5 else [int(rng.paretovariate(0.7)) % 50_000 for _ in range(10)]
    return found[:count]


def measure(name: str, drafter: SuffixDrafter, rows: int) -> str:
    """A line of the table: `rows` requests of 1,000 tokens, whose texts go on as they do."""
    rng = random.Random(0)
    known = phrases(rng)
    answers = [text(rng, known, 400) for _ in range(500)]
    started = time.thread_time()
    for answer in answers:
        drafter.keep(answer)
    kept = (time.thread_time() - started) / (500 * 400)
    prompts = [text(rng, known, TOKENS) for _ in range(rows)]
    rest = [text(rng, known, STEPS * (MOST + 1)) for _ in range(rows)]
    started = time.thread_time()
    texts = [drafter.begin(len(prompt)) for prompt in prompts]
    for own, prompt in zip(texts, prompts, strict=True):
        own.extend(prompt)
    begun = (time.thread_time() - started) / (rows * TOKENS)
    drafting = extending = 0.0
    drafted = accepted = 0
    for _ in range(STEPS):
        started = time.thread_time()
        drafts = [drafter.draft(own, MOST) for own in texts]
        drafting += time.thread_time() - started
        steps = []
        for number, draft in enumerate(drafts):
            right = 0
            while right < len(draft) and draft[right] == rest[number][right]:
                right += 1
            steps.append(rest[number][: right + 1])
            rest[number] = rest[number][right + 1 :]
            drafted, accepted = drafted + len(draft), accepted + right
        started = time.thread_time()
        for own, tokens in zip(texts, steps, strict=True):
            own.extend(tokens)
        extending += time.thread_time() - started
    each = rows * STEPS
    return (
        f"| {name} | {rows} | {1e6 * kept:.2f} | {1e6 * begun:.2f} | {1e6 * drafting / each:.1f} | {1e6 * extending / each:.1f} | "
        f"{1e3 * (drafting + extending) / STEPS:.2f} | {drafted / each:.2f}, {accepted / each:.2f} |"
    )


def main() -> None:
    """Print the table."""
    print(
        "| | rows | an answer's token, us | a prompt's token, us | a draft, us | a step's tokens, us | all rows of a step, ms | drafted, accepted |"
    )
    print("|---|---|---|---|---|---|---|---|")
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=MOST)
    for name, make in (("Python", SuffixIndex), ("C", new_index())):
        for rows in (64, 256):
            print(measure(name, SuffixDrafter(config, make), rows), flush=True)


if __name__ == "__main__":
    main()
