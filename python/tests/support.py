"""support: the model and the data that the tests share."""
import functools
import json
import random
from pathlib import Path

import shoal

ROOT = Path(__file__).resolve().parents[2]
FRY = ROOT / "test" / "models" / "fry-1"
QUESTION = "pick the smallest of 41, 3, 907"
CHOICES = ["answer: 3", "answer: 41", "answer: 907"]


@functools.cache
def fry() -> shoal.Model:
    return shoal.Model(FRY, threads=2, exact=True)


def conversation(rng: random.Random) -> list[dict]:
    a, b = rng.sample(range(1000), 2)
    return [{"role": "user", "content": f"pick the smaller of {a} and {b}"},
            {"role": "assistant", "content": f"answer: {min(a, b)}"}]


def write_conversations(path: Path, n: int, seed: int = 1) -> Path:
    rng = random.Random(seed)
    path.write_text("".join(json.dumps({"messages": conversation(rng)}) + "\n" for _ in range(n)))
    return path
