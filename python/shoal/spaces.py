"""spaces: Discrete and Text of Gymnasium, or classes with the same methods where Gymnasium is not installed."""
from __future__ import annotations

import random
from typing import Any

try:
    from gymnasium.spaces import Discrete, Text
except ImportError:

    class Discrete:  # type: ignore[no-redef]
        """The integers from 0 to n - 1."""

        def __init__(self, n: int, seed: int | None = None):
            self.n = int(n)
            self._random = random.Random(seed)

        def seed(self, seed: int | None = None) -> None:
            self._random.seed(seed)

        def sample(self) -> int:
            return self._random.randrange(self.n)

        def contains(self, x: Any) -> bool:
            return not isinstance(x, bool) and hasattr(x, "__index__") and 0 <= x.__index__() < self.n

        __contains__ = contains

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Discrete) and other.n == self.n

        def __repr__(self) -> str:
            return f"Discrete({self.n})"

    class Text:  # type: ignore[no-redef]
        """Texts of min_length to max_length characters of `charset`."""

        def __init__(self, max_length: int, *, min_length: int = 1, charset: str = "", seed: int | None = None):
            self.min_length, self.max_length = min_length, max_length
            self.characters = "".join(sorted(set(charset)))
            self._random = random.Random(seed)

        def seed(self, seed: int | None = None) -> None:
            self._random.seed(seed)

        def sample(self) -> str:
            n = self._random.randint(self.min_length, self.max_length)
            return "".join(self._random.choices(self.characters, k=n))

        def contains(self, x: Any) -> bool:
            return (isinstance(x, str) and self.min_length <= len(x) <= self.max_length
                    and set(x) <= set(self.characters))

        __contains__ = contains

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Text) and vars_of(other) == vars_of(self)

        def __repr__(self) -> str:
            return f"Text({self.min_length}, {self.max_length}, characters={self.characters})"

    def vars_of(space: Text) -> tuple[int, int, str]:
        return space.min_length, space.max_length, space.characters

__all__ = ["Discrete", "Text"]
