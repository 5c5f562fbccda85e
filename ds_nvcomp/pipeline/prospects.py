"""Whether coding is worth a try, learnt from the tiles before.

Of bytes that do not shrink there is usually more where they come from. Coding random bits cost 13 % over storing them raw (Deflate, one
H200); with one tile in `RETRY` it costs a quarter of that, and where numbers follow again, at most `RETRY` - 1 tiles of them are stored
uncoded. Zeros are not held against a source: they cost little to try, and numbers often follow them.
"""
from __future__ import annotations

RETRY = 4


class Prospects:
    """For the tiles of one encoder, in order. `first` and `last` are the numbers of the sources that a tile begins and ends in."""

    def __init__(self):
        self._since: dict[int, int] = {}  # source: tiles since one of it was last tried, in vain

    def worth(self, first: int, last: int) -> bool:
        """Whether to code the next tile. Each call counts as a tile."""
        if first != last or first not in self._since:
            return True
        self._since[first] += 1
        return self._since[first] % RETRY == 0

    def learn(self, first: int, last: int, *, gained: int, lost: int) -> None:
        """What came of a tile that was coded: chunks that shrank, and chunks that were not zero and did not shrink."""
        if gained:
            for source in range(first, last + 1):
                self._since.pop(source, None)
        elif lost and first == last:
            self._since.setdefault(first, 0)
